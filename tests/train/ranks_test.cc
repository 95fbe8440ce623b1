// Which rank a process is, and the order in which gradients are summed.
#include "train/ranks.h"

#include <torch/torch.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <thread>

#include "data/folder.h"
#include "data/synthetic.h"
#include "data/token_store.h"
#include "nn/layers.h"
#include "nn/rank_threads.h"
#include "nn/testing.h"
#include "train/gradient_sum.h"
#include "train/optimizer.h"
#include "train/step_gradient.h"

namespace assay::train {
namespace {

using data::message_of;

class RankPlaces : public testing::Test {
 protected:
  void set(const std::map<std::string, std::string>& variables) {
    for (const auto& [name, value] : variables) {
      ::setenv(name.c_str(), value.c_str(), 1);
      names_.push_back(name);
    }
  }
  void TearDown() override {
    for (const std::string& name : names_) ::unsetenv(name.c_str());
  }

 private:
  std::vector<std::string> names_;
};

TEST_F(RankPlaces, NoVariablesMeanOneProcess) { EXPECT_FALSE(place_from_environment().launched); }

TEST_F(RankPlaces, TorchrunsVariablesAreRead) {
  set({{"RANK", "5"},
       {"WORLD_SIZE", "8"},
       {"LOCAL_RANK", "1"},
       {"LOCAL_WORLD_SIZE", "4"},
       {"MASTER_ADDR", "node7"},
       {"MASTER_PORT", "1234"},
       {"TORCHELASTIC_USE_AGENT_STORE", "True"},
       {"TORCHELASTIC_RESTART_COUNT", "2"}});
  const RankPlace place = place_from_environment();
  EXPECT_TRUE(place.launched && place.served_outside);
  EXPECT_EQ(place.rank, 5);
  EXPECT_EQ(place.size, 8);
  EXPECT_EQ(place.local_rank, 1);
  EXPECT_EQ(place.local_size, 4);
  EXPECT_EQ(place.address, "node7");
  EXPECT_EQ(place.port, 1234);
  EXPECT_EQ(place.attempt, "2");
}

TEST_F(RankPlaces, OneRankOfTorchrunIsOneProcess) {
  set({{"RANK", "0"}, {"WORLD_SIZE", "1"}, {"MASTER_PORT", "29500"}});
  EXPECT_FALSE(place_from_environment().launched);
}

TEST_F(RankPlaces, NumberOfRanksWithoutTheOwnRankIsAnError) {
  set({{"WORLD_SIZE", "4"}});
  EXPECT_EQ(message_of([] { place_from_environment(); }),
            "WORLD_SIZE = 4 is set, but RANK, the number of this process, is not");
  set({{"WORLD_SIZE", "1"}});
  EXPECT_FALSE(place_from_environment().launched);
}

TEST_F(RankPlaces, SlurmsVariablesAreRead) {
  set({{"SLURM_STEP_NUM_TASKS", "16"},
       {"SLURM_PROCID", "9"},
       {"SLURM_LOCALID", "1"},
       {"SLURM_STEP_NODELIST", "gpu[08-09]"},
       {"SLURM_JOB_ID", "1234567"}});
  const RankPlace place = place_from_environment();
  EXPECT_TRUE(place.launched);
  EXPECT_EQ(place.rank, 9);
  EXPECT_EQ(place.size, 16);
  EXPECT_EQ(place.local_rank, 1);
  EXPECT_EQ(place.address, "gpu08");
  EXPECT_EQ(place.port, 24567);
}

TEST_F(RankPlaces, OneTaskOfSlurmIsOneProcess) {
  set({{"SLURM_STEP_NUM_TASKS", "1"}, {"SLURM_PROCID", "0"}, {"SLURM_LOCALID", "0"}});
  EXPECT_FALSE(place_from_environment().launched);
}

TEST_F(RankPlaces, OpenMpisVariablesAreRead) {
  set({{"OMPI_COMM_WORLD_SIZE", "4"},
       {"OMPI_COMM_WORLD_RANK", "3"},
       {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
       {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"}});
  EXPECT_NE(message_of([] { place_from_environment(); }).find("Set MASTER_ADDR"),
            std::string::npos);
  set({{"MASTER_ADDR", "node1"}});
  const RankPlace place = place_from_environment();
  EXPECT_EQ(place.rank, 3);
  EXPECT_EQ(place.size, 4);
  EXPECT_EQ(place.local_rank, 1);
  EXPECT_EQ(place.address, "node1");
}

TEST(SlurmNodeList, FirstHostIsRead) {
  EXPECT_EQ(first_host("node1"), "node1");
  EXPECT_EQ(first_host("node1,node2"), "node1");
  EXPECT_EQ(first_host("node[03-05,08],other"), "node03");
  EXPECT_EQ(first_host("rack1-[7]-a,other[1-2]"), "rack1-7-a");
  EXPECT_EQ(first_host("login,node[1-2]"), "login");
  EXPECT_EQ(first_host("rack[0-1]n[2-3],other"), "rack0n2");
  const int64_t tasks[] = {4, 4, 3, 1};
  for (int64_t node = 0; node < 4; ++node) EXPECT_EQ(tasks_of_node("4(x2),3,1", node), tasks[node]);
  for (const char* wrong : {"", "4", "x", "0", "4,,3"})
    EXPECT_THROW(tasks_of_node(wrong, 1), BadInput) << wrong;
}

// With NCCL, a rank that ends earlier leaves the kernels of the others waiting.
TEST(Ranks, OneEndsWhenAllAreIdle) {
  nn::RankThreads threads(2);
  std::atomic<bool> first_is_idle = false;
  std::atomic<bool> second_ended_early = false;
  threads.end_each([&](std::unique_ptr<Ranks>& ranks) {
    const bool first = ranks->first();
    if (first) {
      std::this_thread::sleep_for(std::chrono::milliseconds(300));
      first_is_idle = true;
    }
    ranks.reset();
    if (!first) second_ended_early = !first_is_idle;
  });
  EXPECT_FALSE(second_ended_early);
}

TEST(GradientSum, TreeAddsNeighbours) {
  std::vector<at::Tensor> leaves;
  std::vector<float> x;
  for (int i = 0; i < 7; ++i) {
    x.push_back(std::pow(0.3f, float(i)));
    leaves.push_back(at::full({}, x.back()));
  }
  const float expected = ((x[0] + x[1]) + (x[2] + x[3])) + ((x[4] + x[5]) + x[6]);
  EXPECT_EQ(tree_sum(leaves).item<float>(), expected);
}

// One process adds its slices as they come, and gets the bits of the whole tree.
TEST(GradientSum, SlicesThatComeOneByOneGiveTheTree) {
  for (int64_t slices = 1; slices <= 13; ++slices) {
    at::Tensor parameter = at::zeros({1000}).requires_grad_();
    GradientSum sum({parameter}, slices, nullptr, false);
    ASSERT_EQ(sum.end() - sum.begin(), slices);
    std::vector<at::Tensor> leaves;
    for (int64_t slice = 0; slice < slices; ++slice) {
      leaves.push_back(at::randn({1000}, nn::generator(fmt::format("slice {}", slice))));
      if (slice + 1 == slices) sum.start_last();
      parameter.mutable_grad() = leaves.back().clone();
      if (slice + 1 < slices) sum.keep();
    }
    sum.finish();
    EXPECT_TRUE(at::equal(parameter.grad(), tree_sum(leaves))) << slices << " slices";
  }
}

std::vector<at::Tensor> parameters_of_odd_sizes() {
  std::vector<at::Tensor> parameters;
  for (const int64_t size : {1, 7, 64, 65, 130, 1000})
    parameters.push_back(at::full({size, 2}, double(size)).requires_grad_());
  return parameters;
}

TEST(Pieces, PartsAreAlignedAndCoverEveryParameterOnce) {
  const std::vector<at::Tensor> parameters = parameters_of_odd_sizes();
  for (const int64_t count : {1, 2, 6}) {
    const Pieces pieces(parameters, count);
    EXPECT_EQ(pieces.buckets.size() > 1, count > 1);
    bool divided = false;
    for (size_t i = 0; i < parameters.size(); ++i) {
      int64_t end = 0;
      for (const Part& part : pieces.parts[i]) {
        const int64_t length = pieces.buckets[part.bucket].size / count;
        EXPECT_EQ(part.begin, end);
        EXPECT_EQ(part.begin % 64, 0);
        EXPECT_EQ(part.place % 64, 0);
        EXPECT_EQ(part.place / length, part.piece);
        EXPECT_EQ((part.place + part.size - 1) / length, part.piece);
        end += part.size;
      }
      EXPECT_EQ(end, parameters[i].numel());
      divided = divided || pieces.parts[i].size() > 1;
    }
    EXPECT_EQ(divided, count > 1);
  }
}

// The gradient of the largest parameter is sent without a copy.
TEST(GradientSum, OwnersHaveTheSumsOfTheirParts) {
  constexpr int64_t kSlices = 4;
  const std::vector<std::vector<int64_t>> shapes = {{7, 3}, {2048, 2048}, {100}};
  const auto leaf = [&](int64_t slice, size_t i) {
    return at::randn(shapes[i], nn::generator(fmt::format("slice {} {}", slice, i)));
  };
  nn::RankThreads(2).run([&](Ranks& ranks) {
    std::vector<at::Tensor> parameters;
    for (const auto& shape : shapes) parameters.push_back(at::zeros(shape).requires_grad_());
    GradientSum sum(parameters, kSlices, &ranks, false);
    for (int64_t slice = sum.begin(); slice < sum.end(); ++slice) {
      if (slice + 1 == sum.end()) sum.start_last();
      for (size_t i = 0; i < shapes.size(); ++i) parameters[i].mutable_grad() = leaf(slice, i);
      if (slice + 1 < sum.end()) sum.keep();
    }
    sum.finish();
    for (size_t i = 0; i < shapes.size(); ++i) {
      std::vector<at::Tensor> leaves;
      for (int64_t slice = 0; slice < kSlices; ++slice) leaves.push_back(leaf(slice, i));
      const at::Tensor expected = tree_sum(leaves).view(-1);
      for (const Part& part : sum.pieces().parts[i])
        if (sum.owns(part)) {
          EXPECT_TRUE(at::equal(sum.gradient(part), expected.narrow(0, part.begin, part.size)))
              << "parameter " << i << ", piece " << part.piece;
        }
    }
  });
}

TEST(GradientSum, GradientsOfWeightsAreMadeWhereTheyAreSentFrom) {
  nn::RankThreads(2).run([](Ranks& ranks) {
    nn::Linear linear(64, 32);
    nn::Linear twice(64, 32);
    const at::NoGradGuard no_grad;
    const at::Tensor x = at::randn({16, 64}, nn::generator("x")).to(at::kBFloat16);
    GradientSum sum({linear.weight, twice.weight}, 2, &ranks, /*overlap=*/false);
    linear.gradient_place = sum.place(0);
    twice.gradient_place = sum.place(1);
    const auto is_in_place = [&](const nn::Linear& of) {
      return of.weight.grad().data_ptr() == of.gradient_place->memory.data_ptr();
    };
    const auto pass = [&] {
      const at::AutoGradMode recorded(true);
      at::Tensor y = linear.forward(x) + twice.forward(x) + twice.forward(x * 2);
      y.sum().backward();
    };
    pass();
    EXPECT_FALSE(is_in_place(linear));
    const at::Tensor expected = linear.weight.grad().clone();
    const at::Tensor expected_twice = twice.weight.grad().clone();
    for (nn::Linear* each : {&linear, &twice}) each->weight.mutable_grad().reset();
    sum.start_last_slice();
    pass();
    EXPECT_TRUE(is_in_place(linear));
    EXPECT_FALSE(is_in_place(twice)) << "autograd adds the gradients of both products";
    EXPECT_TRUE(at::equal(linear.weight.grad(), expected));
    EXPECT_TRUE(at::equal(twice.weight.grad(), expected_twice));
    pass();  // of another micro-batch
    EXPECT_TRUE(is_in_place(linear));
    EXPECT_TRUE(at::equal(linear.weight.grad(), expected * 2));
    sum.start_last();
    sum.finish();
    for (const Part& part : sum.pieces().parts[0])
      if (sum.owns(part)) {
        EXPECT_TRUE(at::equal(sum.gradient(part),
                              (expected * 4).view(-1).narrow(0, part.begin, part.size)));
      }
  });
}

// Each rank changes the parts that it owns; the shapes need padding.
TEST(GradientSum, OwnersSendTheirPartsToAllRanks) {
  nn::RankThreads(3).run([](Ranks& ranks) {
    const std::vector<at::Tensor> parameters = parameters_of_odd_sizes();
    GradientSum sum(parameters, 6, &ranks, false);
    const at::NoGradGuard no_grad;
    const auto expect_values = [&](double factor, double per_piece) {
      for (size_t i = 0; i < parameters.size(); ++i)
        for (const Part& part : sum.pieces().parts[i]) {
          const double expected =
              factor * double(parameters[i].size(0)) + per_piece * double(part.piece);
          const at::Tensor values = parameters[i].view(-1).narrow(0, part.begin, part.size);
          EXPECT_TRUE((values == expected).all().item<bool>()) << "parameter " << i;
        }
    };
    expect_values(1, 0);
    for (size_t i = 0; i < parameters.size(); ++i)
      for (const Part& part : sum.pieces().parts[i])
        if (sum.owns(part))
          parameters[i].view(-1).narrow(0, part.begin, part.size).mul_(-1).add_(double(part.piece));
    for (size_t bucket = sum.pieces().buckets.size(); bucket-- > 0;) sum.share(bucket);
    sum.wait_for_parameters();
    expect_values(-1, 1);
  });
}

// Each rank changes the values that it owns and the rounded ones that it sends.
TEST(GradientSum, RoundedParametersAreDividedAndGathered) {
  nn::RankThreads(3).run([](Ranks& ranks) {
    const std::vector<at::Tensor> parameters = parameters_of_odd_sizes();
    std::vector<bool> rounded(parameters.size());
    for (const size_t i : {1, 3, 5}) rounded[i] = true;
    GradientSum sum(parameters, 6, &ranks, false, rounded);
    const at::NoGradGuard no_grad;
    const auto expected = [&](size_t i, double change) {
      return double(parameters[i].size(0)) + change;
    };
    for (const double change : {0.0, 0.001, 0.002}) {
      sum.gather_parameters();
      for (size_t i = 0; i < parameters.size(); ++i)
        EXPECT_TRUE(at::allclose(parameters[i], at::full({}, expected(i, change)), 0, 1e-4));
      sum.divide_parameters();
      for (size_t i = 0; i < parameters.size(); ++i) {
        EXPECT_EQ(sum.rounded(i) != nullptr, rounded[i]);
        EXPECT_EQ(parameters[i].isnan().all().item<bool>(), rounded[i]);
        for (const Part& part : sum.pieces().parts[i])
          if (sum.owns(part)) sum.values(part).add_(0.001);
        if (!rounded[i]) continue;
        EXPECT_TRUE(sum.rounded(i)->is_of(parameters[i]));
        for (const Part& part : sum.pieces().parts[i])
          if (sum.owns(part))
            sum.rounded(i)->value.view(-1).narrow(0, part.begin, part.size).fill_(part.piece);
      }
      for (size_t bucket = sum.pieces().buckets.size(); bucket-- > 0;) sum.share(bucket);
      sum.wait_for_parameters();
      for (size_t i = 0; i < parameters.size(); ++i)
        for (const Part& part : sum.pieces().parts[i])
          if (rounded[i]) {
            const at::Tensor got = sum.rounded(i)->value.view(-1);
            EXPECT_TRUE(
                (got.narrow(0, part.begin, part.size) == double(part.piece)).all().item<bool>());
          }
    }
  });
}

std::vector<nn::ModelSpec> models_with_each_part() {
  std::vector<nn::ModelSpec> models;
  for (const bool is_mixer : {true, false}) {
    const auto& registry = is_mixer ? nn::mixers() : nn::channel_mixers();
    for (const std::string& part : registry.names())
      for (const std::string& example : registry.at(part).examples) {
        const std::string text = fmt::format(
            "[model]\nvocab_size = 64\nd_model = 48\nnum_layers = 3\n"
            "tie_embeddings = {}\npattern = ['{}']\nchannel_mixer = '{}'\n[model.{}]\n",
            is_mixer, is_mixer ? part : "attention", is_mixer ? "swiglu" : part, part);
        models.push_back(nn::ModelSpec::read(ConfigNode::parse(text + example).child("model")));
      }
  }
  return models;
}

// A mixer that reads the float32 weight of a projection gets NaN from ranks.
TEST(StepGradient, RanksTrainEveryMixerInBfloat16AsOneProcess) {
  const data::Folder folder;
  data::synthesize(folder / "store",
                   {.documents = 20, .held_out = 4, .document_length = 64, .vocabulary = 64});
  const data::TokenStore store(folder / "store");
  const TrainConfig config{
      .batch_size = 2, .micro_batch_size = 1, .gradient_slices = 2, .sequence_length = 24};
  const data::Sampler sampler(store, {.sequence_length = config.sequence_length});
  const auto weights_after_steps = [&](const nn::ModelSpec& spec, Ranks* ranks) {
    nn::LanguageModel model(spec);
    model.compute_dtype = at::kBFloat16;
    model.initialise(1);
    StepGradient gradient(model, sampler, config, at::kCPU, ranks);
    AdamW optimizer(model, config, gradient.sum());
    for (int64_t step = 0; step < 3; ++step) {
      gradient.compute(step, false, false);
      optimizer.step(1e-2, step);
    }
    gradient.gather_parameters();
    return model.parameters();
  };
  nn::RankThreads(2).run([&](Ranks& ranks) {
    for (const nn::ModelSpec& spec : models_with_each_part()) {
      const auto expected = weights_after_steps(spec, nullptr);
      const auto found = weights_after_steps(spec, &ranks);
      for (size_t i = 0; i < expected.size(); ++i) {
        ASSERT_TRUE(expected[i].isfinite().all().item<bool>()) << spec.toml();
        ASSERT_TRUE(at::equal(found[i], expected[i])) << spec.toml();
      }
    }
  });
}

TEST(GradientSum, RanksShareSlicesOfOneSequenceOrWholeSequences) {
  // 4 = 2 parts of the batch with 2 slices each
  for (const int64_t ranks : {1, 2, 4}) EXPECT_NO_THROW(check_shares(4, 2, 2, ranks));
  for (const int64_t ranks : {1, 3}) EXPECT_NO_THROW(check_shares(4, 1, 3, ranks));
  // 3 ranks with 2 of 3 slices each: the second one would have the end of one and the begin of
  // another sequence
  const std::string message = message_of([] { check_shares(4, 2, 3, 3); });
  EXPECT_NE(message.find("gradient_slices = 2 with train.context_slices = 3"), std::string::npos);
  EXPECT_NE(message.find("are 1, 6."), std::string::npos) << message;
}

TEST(GradientSum, NumbersOfRanksThatCannotShareAreRejected) {
  EXPECT_NO_THROW(check_shares(12, 12, 1, 3));
  EXPECT_NO_THROW(check_shares(12, 6, 1, 1));
  for (const int64_t ranks : {2, 4, 5, 24})
    EXPECT_NE(message_of([&] { check_shares(12, 12, 1, ranks); }).find("are 1, 3, 6, 12"),
              std::string::npos)
        << ranks;
  EXPECT_NE(message_of([] { check_shares(12, 5, 1, 5); }).find("train.batch_size = 12"),
            std::string::npos);
}

}  // namespace
}  // namespace assay::train
