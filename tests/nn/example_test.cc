// The example of docs/architectures.md, compiled from the page: a newcomer's mixer obeys the
// law of mixers (MixerForms takes it from the registry), trains by the page's own configuration
// and is scored.
#include <torch/torch.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "data/folder.h"
#include "data/synthetic.h"
#include "data/token_store.h"
#include "eval/held_out.h"
#include "exchange/model_files.h"
#include "testing.h"
#include "train/trainer.h"

namespace assay::nn {
namespace {

std::string block(const std::string& language) {
  const std::string page = read_file(fs::path(ASSAY_SOURCE_DIR) / "docs" / "architectures.md");
  const std::string fence = "```" + language + "\n";
  const size_t begin = page.find(fence) + fence.size();
  return page.substr(begin, page.find("```\n", begin) - begin);
}

TEST(Example, IsRegisteredAndShort) {
  EXPECT_EQ(mixers().at("decay_attention").examples.size(), 2u) << "MixerForms runs these";
  EXPECT_LT(std::ranges::count(block("cpp"), '\n'), 60);
}

TEST(Example, TrainsAndIsScored) {
  // Too small for two to gain anything, and on a busy machine they wait for each other
  at::set_num_threads(1);
  const data::Folder folder;
  data::SyntheticOptions options;
  options.documents = 200;
  options.held_out = 16;
  data::synthesize(folder / "store", options);
  const train::RunConfig config =
      train::read_run_config(ConfigNode::parse(block("toml"), "mine.toml"), folder / "store");
  const run::Outcome done =
      train::train(config, {.store = folder / "store", .run = folder / "run", .device = "cpu"});
  const exchange::OpenModel trained = exchange::open_model(folder / "run");
  const auto untrained = std::make_shared<LanguageModel>(trained.model->spec);
  untrained->initialise(0);
  const data::TokenStore store(folder / "store");
  const eval::HeldOut held_out(store, {config.train.eval_sets, config.train.domains, 64, 2048});
  const auto before = held_out.run(*untrained);
  const auto after = held_out.run(*trained.model);
  for (const std::string domain :
       {"known_a.valid", "known_b.valid"})  // what was trained on; the other domains get worse
    EXPECT_LT(after.at(domain).total().loss(), before.at(domain).total().loss() - 0.5)
        << domain << ", trained to " << done.final_loss;
}

// `assay score` and `assay generate` agree: the log-probabilities of a whole text are those of its
// tokens, one by one.
TEST(Example, DecodesAsItScores) {
  const auto model =
      random_model("[model]\nvocab_size = 40\nd_model = 24\npattern = ['decay_attention']\n");
  const at::NoGradGuard no_grad;
  const at::Tensor tokens = random_tokens(1, 21, 40, "example");
  ModelState state;
  const at::Tensor losses = model->token_losses(tokens);
  for (int64_t t = 0; t < 20; ++t) {
    const at::Tensor logits = model->logits(tokens.slice(1, t, t + 1), state)[0][0];
    EXPECT_NEAR(-at::log_softmax(logits, 0)[tokens[0][t + 1].item<int64_t>()].item<double>(),
                losses[0][t].item<double>(), 1e-5)
        << "token " << t;
  }
}

}  // namespace
}  // namespace assay::nn
