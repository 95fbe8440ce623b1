// Bad input as a hostile stranger gives it: exit code 2 (or 1 when the machine fails), one clear
// message, nothing lost.
#include <sys/mount.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "base/random.h"
#include "cli/program.h"

namespace assay::cli {
namespace {

class BadInputs : public testing::Test {
 protected:
  void SetUp() override { synthesize(folder_); }

  // Every part of `parts` stands in the message; what was there stays as it was, and with exit code
  // 2 nothing is added.
  void refuses(const std::string& arguments, int exit_code, const std::vector<std::string>& parts) {
    SCOPED_TRACE("assay " + arguments);
    const auto before = contents(folder_.path());
    const Outcome outcome = run(folder_.path(), arguments);
    check_message(outcome, exit_code, parts);
    const auto after = contents(folder_.path());
    for (const auto& [path, hash] : before)
      EXPECT_TRUE(after.contains(path) && after.at(path) == hash) << path << " changed";
    if (exit_code == 2) EXPECT_EQ(after.size(), before.size()) << "something was left behind";
  }
  void check_message(const Outcome& outcome, int exit_code, const std::vector<std::string>& parts) {
    EXPECT_EQ(outcome.exit_code, exit_code) << outcome.error;
    const size_t message = outcome.error.rfind("assay: ");
    ASSERT_NE(message, std::string::npos) << outcome.error;
    EXPECT_LE(
        std::count(outcome.error.begin() + std::ptrdiff_t(message), outcome.error.end(), '\n'), 4)
        << outcome.error;
    for (const std::string& part : parts)
      EXPECT_NE(outcome.error.find(part, message), std::string::npos) << part << " is not in\n"
                                                                      << outcome.error;
    for (const char* never : {"terminate called", "Exception raised from", "frame #",
                              "json.exception", "Segmentation", "AddressSanitizer"})
      EXPECT_EQ(outcome.error.find(never), std::string::npos) << outcome.error;
  }
  std::string noise(size_t size) {
    std::string bytes;
    for (Random random(1, "noise"); bytes.size() < size;) bytes += char(random.next());
    return bytes;
  }
  // A copy of the store with one file cut short.
  void cut(const std::string& name, const std::string& file, uint64_t size) {
    fs::copy(folder_ / "store", folder_ / name, fs::copy_options::recursive);
    fs::resize_file(folder_ / name / file, size);
  }
  std::string on(const std::string& store) {
    return "train '" + kSmoke + "' -o run --data " + store;
  }

  data::Folder folder_;
};

TEST_F(BadInputs, FilesThatAreMissingCutOffOrNoise) {
  folder_.write("noise", noise(5000));
  folder_.write("noise.zst", noise(5000));
  folder_.write("empty", "");
  cut("cut_bin", "known_a.train.bin", 15350);
  cut("cut_idx", "known_a.train.idx", 100);
  cut("cut_manifest", "manifest.json", 200);
  cut("gone", "known_b.train.bin", 0);
  fs::remove(folder_ / "gone" / "known_b.train.bin");
  refuses("train missing.toml --data store -o run", 2, {"missing.toml", "no such file"});
  refuses("train noise --data store -o run", 2, {"noise:1:"});
  refuses("train empty --data store -o run", 2, {"empty"});
  refuses("train store --data store -o run", 2, {"store"});
  refuses(on("missing"), 2, {"missing", "no such folder"});
  refuses(on("noise"), 2, {"noise"});
  refuses(on("cut_bin"), 2, {"known_a.train", "15360", "15350"});
  refuses(on("cut_idx"), 2, {"known_a.train.idx", "100 bytes"});
  refuses(on("cut_manifest"), 2, {"manifest.json"});
  refuses(on("gone"), 2, {"known_b.train.bin", "No such file"});
  refuses("data prepare noise.zst --tokenizer noise -o out", 2, {"noise", "SentencePiece"});
  refuses("data info cut_bin", 2, {"known_a.train"});
}

TEST_F(BadInputs, SettingsWithPlaceAndNearestName) {
  folder_.write("bad.toml", "[model]\nd_model = 32\nnum_layer = 2\n");
  folder_.write("type.toml", "[model]\nd_model = 'wide'\n");
  folder_.write("mixer.toml", "[model]\npattern = ['atention']\n[train]\nsteps = 1\n");
  refuses("train bad.toml --data store -o run", 2,
          {"bad.toml:3:", "unknown key 'num_layer'", "did you mean 'num_layers'?"});
  refuses("train type.toml --data store -o run", 2, {"type.toml:2:", "d_model", "integer"});
  refuses("train mixer.toml --data store -o run", 2, {"atention", "did you mean 'attention'?"});
  folder_.write("heads.toml", "[model]\nd_model = 32\n[model.attention]\nnum_heads = 5\n");
  refuses(
      "train heads.toml --data store -o run --set train.steps=1", 2,
      {"heads.toml:3:1: model.attention: num_heads = 5 must be positive and divide d_model = 32"});
  refuses("train transformer++ --data store -o run", 2,
          {"transformer++: no such file", "plans/models/transformer++.toml"});
  refuses("train plans/models/smoke.toml --data store -o run", 2,
          {"plans/models/smoke.toml: no such file", "the preset 'smoke' is"});
  refuses("train transformer++_1.3b --data store -o run", 2,
          {"transformer++_1.3b: no such file", "plans/models/transformer++_1.3b.toml"});
  for (const auto& [set, parts] : std::vector<std::pair<std::string, std::vector<std::string>>>{
           {"train.stepz=3", {"--set train.stepz=3", "did you mean 'steps'?"}},
           {"train.steps", {"--set train.steps", "KEY=VALUE"}},
           {"train.learning_rate=fast", {"--set train.learning_rate=fast", "number"}},
           {"train.tokens=100", {"train.steps", "not both"}},
           {"train.steps=-4", {"train.steps", "positive"}},
           {"train.steps=9223372036854775807", {"train.steps", "below"}},
           {"train.sequence_length=4611686018427387904", {"tokens per step"}},
           {"train.schedule=linaer", {"linaer", "did you mean 'linear'?"}},
           {"train.domains=[\"known_a\",\"known_a\"]", {"train.domains", "names no domain twice"}},
           {"train.micro_batch_size=3", {"micro_batch_size", "divisor"}},
           {"train.learning_rate=nan", {"learning_rate", "finite"}},
           {"modle.d_model=3", {"modle", "did you mean 'model'?"}},
           {"model.d_model=33", {"num_heads", "33"}},
           {"model.num_layers=0", {"num_layers", "from 1 to 10000"}},
           {"model.num_layers=1000000000000", {"num_layers", "from 1 to 10000"}},
           {"model.d_model=9223372036854775807", {"d_model", "from 1 to 1048576"}},
           {"model.vocab_size=100000000000", {"vocab_size", "from 1 to 2147483648"}},
           {"model.vocab_size=17", {"--set model.vocab_size=17", "256"}},
           {"train.domains=[\"know_a\"]", {"know_a", "did you mean 'known_a'?"}},
           {"train.domains=[\"fresh_a\"]", {"fresh_a", "train"}},
           {"train.eval_sets=[\"known_a.tset\"]", {"tset", "did you mean 'test'?"}},
           {"train.weights=[1]", {"1 weights for 2 domains"}},
           {"train.sequence_length=9000", {"known_a.train", "7680", "9001"}}})
    refuses(fmt::format("{} --set '{}'", on("store"), set), 2, parts);
}

TEST_F(BadInputs, Options) {
  refuses(on("store") + " --device gpu", 2, {"gpu", "cuda:N"});
  refuses(on("store") + " --device cuda:99", 2, {"cuda:99"});
  refuses(on("store") + " --threads=-1", 2, {"threads"});
  refuses(on("store") + " --threads many", 2, {"threads", "many"});
  refuses(on("store") + " --sed a=b", 2, {"--sed"});
  refuses("trian", 2, {"unknown command 'trian'", "did you mean 'train'?"});
  refuses("list mixer", 2, {"mixer", "did you mean 'mixers'?"});
  refuses("describe mixer atention", 2, {"did you mean 'attention'?"});
  refuses("describe model transfomer++", 2, {"did you mean 'transformer++'?"});
  refuses("bench atention", 2, {"bench takes one of", "no 'atention'; did you mean 'attention'?"});
  refuses("data", 2, {"data takes one of prepare, synth"});
}

TEST_F(BadInputs, NoSubcommandPrintsTheHelp) {
  const Outcome outcome = run(folder_.path(), "");
  EXPECT_EQ(outcome.exit_code, 2);
  EXPECT_NE((outcome.out + outcome.error).find("Subcommands:"), std::string::npos) << outcome.error;
}

TEST_F(BadInputs, NoGpuIsSaidAndTheFolderStaysFree) {
  if (run(folder_.path(), "doctor --json").out.find("\"gpus\": []") == std::string::npos)
    GTEST_SKIP() << "a CUDA device was found";
  refuses(on("store") + " --device cuda", 2, {"no CUDA device found", "choose cpu"});
  EXPECT_FALSE(fs::exists(folder_ / "run"));
  EXPECT_EQ(run(folder_.path(), train("run", "--set train.steps=1")).exit_code, 0);
}

TEST_F(BadInputs, ModelsThatAreNone) {
  ASSERT_EQ(run(folder_.path(), train("run", "--set train.steps=1")).exit_code, 0);
  folder_.write("lines", "{\"id\": 1, \"tokens\": [1, 2, 3]}\n{\"id\": 2, \"tok\n");
  folder_.write("good", "{\"id\": 1, \"tokens\": [1, 2, 3]}\n");
  folder_.write("far", "{\"id\": 1, \"tokens\": [1, 256]}\n");
  folder_.write("text", "{\"id\": 1, \"text\": \"words\"}\n");
  refuses("score --model run lines", 1, {"lines:2:", "JSON"});
  refuses("score --model run far", 1, {"far:1:", "256"});
  refuses("score --model run text", 1, {"tokenizer"});
  refuses("score --model missing good", 2, {"missing"});
  refuses("score --model store good", 2, {"store", "not a model"});
  const fs::path weights = folder_ / "run" / "checkpoints" / "step-1" / "model.safetensors";
  const std::string whole = read_file(weights);
  write_file(weights, whole.substr(0, whole.size() - 5));
  refuses("score --model run good", 2, {"model.safetensors", "outside the file"});
  write_file(weights, noise(5000));
  refuses("score --model run good", 2, {"model.safetensors", "not a safetensors file"});
  write_file(weights, std::string("\xff\xff\xff\xff\xff\xff\xff\x7f", 8) + whole.substr(8));
  refuses("score --model run good", 2, {"model.safetensors", "9223372036854775807"});
  write_file(weights, whole);
  EXPECT_EQ(run(folder_.path(), "score --model run good").exit_code, 0);
}

TEST_F(BadInputs, TokenizerOfAnotherVocabulary) {
  std::string text;
  for (int i = 0; i < 300; ++i)
    text += "line " + std::to_string(i) + " of a text about sequence models and their domains\n";
  folder_.write("text.txt", text);
  folder_.write("lines", "{\"id\": 1, \"text\": \"sequence models and their domains\"}\n");
  ASSERT_EQ(run(folder_.path(), "tokenizer train text.txt --vocab 320 -o t.model").exit_code, 0);
  ASSERT_EQ(run(folder_.path(), train("run", "--set train.steps=1")).exit_code, 0);
  refuses("score --model run --tokenizer t.model lines", 1,
          {"lines:1:", "outside the model's vocabulary of 256"});
  folder_.write("empty", "{\"id\": 1, \"text\": \"\"}\n");
  refuses("score --model run --tokenizer t.model empty", 1, {"empty:1:", "the text is empty"});
}

TEST_F(BadInputs, DamagedTokensLeaveNoRun) {
  const fs::path part = folder_ / "store" / "known_a.train.bin";
  const std::string tokens = read_file(part);
  write_file(part, std::string(tokens.size(), '\xff'));
  refuses(train("run"), 2, {"known_a.train.bin", "id 65535", "the file is damaged"});
  EXPECT_FALSE(fs::exists(folder_ / "run"));
  write_file(part, tokens);
  const Outcome outcome = run(folder_.path(), train("run"));
  EXPECT_EQ(outcome.exit_code, 0) << outcome.error;
}

TEST_F(BadInputs, ARunIsNeverOverwritten) {
  const std::string long_run = train(
      "run",
      "--set train.steps=100000 --set train.checkpoint_every=2 --set train.eval_every=100000 ");
  {
    Process first(folder_.path(), long_run);
    ASSERT_TRUE(
        wait_until(first, [&] { return fs::exists(folder_ / "run" / "checkpoints" / "step-4"); }));
    for (const char* resume : {"", "--resume"})
      check_message(run(folder_.path(), long_run + resume), 2, {"in use by process"});
    EXPECT_TRUE(first.running());
    first.signal(SIGINT);
    EXPECT_EQ(first.wait().exit_code, 130);
  }
  refuses(long_run, 2, {"holds a run already", "--resume"});
  refuses(train("run", "--set train.steps=99999 --set train.log_every=7 --resume"), 2,
          {"another configuration", "train.steps is 99999 instead of 100000",
           "train.log_every is 7 instead of 500"});
  fs::rename(folder_ / "store", folder_ / "first_store");
  synthesize(folder_, "--seed 9");
  refuses(long_run + "--resume", 2, {"run on other data"});
  fs::remove_all(folder_ / "store");
  fs::rename(folder_ / "first_store", folder_ / "store");

  std::vector<fs::path> checkpoints(fs::directory_iterator(folder_ / "run" / "checkpoints"), {});
  const auto number = [](const fs::path& path) {
    return std::stoi(path.filename().string().substr(5));
  };
  const fs::path newest = *std::ranges::max_element(checkpoints, {}, number);
  for (const char* file : {"model.safetensors", "optimizer.safetensors", "state.json"})
    for (const bool noisy : {false, true}) {
      const std::string whole = read_file(newest / file);
      write_file(newest / file, noisy ? noise(whole.size()) : whole.substr(0, whole.size() / 2));
      refuses(long_run + "--resume", 2,
              {file, newest.filename(), "Remove it to continue from the previous one"});
      write_file(newest / file, whole);
    }
}

TEST_F(BadInputs, BrokenRecordOfAFinishedRunIsNamed) {
  ASSERT_EQ(run(folder_.path(), train("run", "--set train.steps=1")).exit_code, 0);
  folder_.write("run/done.json", "{");
  refuses(train("run", "--set train.steps=1 --resume"), 2,
          {"run/done.json: broken JSON", "Remove the file"});
}

// Deeper than code that recurses over JSON can bear.
TEST_F(BadInputs, DeepJsonIsRejected) {
  const std::string deep = std::string(100'000, '[') + std::string(100'000, ']');
  fs::copy(folder_ / "store", folder_ / "deep", fs::copy_options::recursive);
  folder_.write("deep/manifest.json", "{\"format\": " + deep + "}");
  refuses(on("deep"), 2, {"deep/manifest.json", "more than 64 levels"});
  refuses("data synth -o deep --overwrite --documents 5 --held-out 2", 2,
          {"deep", "manifest.json that is not a token store's"});
  folder_.write("model/config.json", "{\"model_type\": " + deep + "}");
  refuses("import model -o out", 2, {"model/config.json", "more than 64 levels"});
}

TEST_F(BadInputs, FileThatIsCutWhileTrainingReadsItIsNamed) {
  Process process(folder_.path(),
                  train("run", "--set train.steps=100000 --set train.checkpoint_every=2"));
  ASSERT_TRUE(
      wait_until(process, [&] { return fs::exists(folder_ / "run" / "checkpoints" / "step-2"); }));
  fs::resize_file(folder_ / "store" / "known_a.train.bin", 0);
  check_message(process.wait(), 1, {"known_a.train.bin", "became shorter while it was read"});
}

TEST_F(BadInputs, DomainWithoutASplitIsNotSuggestedForItself) {
  fs::copy(folder_ / "store", folder_ / "small", fs::copy_options::recursive);
  auto manifest = nlohmann::json::parse(read_file(folder_ / "small" / "manifest.json"));
  auto& parts = manifest["parts"];
  std::erase_if(parts.get_ref<nlohmann::json::array_t&>(), [](const auto& part) {
    return part["domain"] == "known_a" && part["split"] == "valid";
  });
  write_file(folder_ / "small" / "manifest.json", manifest.dump());
  folder_.write(
      "plan.toml",
      "reference = \"smoke\"\nmodels = [\"smoke\"]\n"
      "data = { train = [\"known_a\"], out_of_domain = [\"fresh_a\"], sequence_length = 64 }\n"
      "train = { steps = 2, batch = 4 }\n");
  const Outcome outcome = run(folder_.path(), "run plan.toml -o study --data small --dry-run");
  check_message(
      outcome, 2,
      {"domain 'known_a'", "has no split 'valid'; it has test, train", "--valid-fraction"});
  EXPECT_EQ(outcome.error.find("did you mean"), std::string::npos) << outcome.error;
}

TEST_F(BadInputs, StoreInPlaceOfAnOutputFolderIsRefused) {
  folder_.write("plan.toml",
                "reference = \"smoke\"\nmodels = [\"smoke\"]\n"
                "data = { store = \"store\", train = [\"known_a\"], sequence_length = 64 }\n"
                "train = { steps = 2, batch = 4 }\n");
  for (const char* command : {"run plan.toml", "run plan.toml --dry-run", "eval mqar mqar/small"})
    refuses(std::string(command) + " -o store", 2,
            {"store: The folder holds a token store (manifest.json)", "Nothing was written."});
  refuses("train '" + kSmoke + "' --data store -o store", 2, {"holds a token store"});
}

TEST_F(BadInputs, AFileInPlaceOfAFolder) {
  folder_.write("file", "kept");
  refuses("train '" + kSmoke + "' --data store -o file", 2, {"file", "Not a directory"});
  refuses("train '" + kSmoke + "' --data store -o file/run", 2,
          {"file/run", "Not a directory. Nothing was written. Give another folder."});
  refuses("data synth -o file/store --documents 5 --held-out 2", 2, {"file"});
  refuses("data synth -o store --documents 5 --held-out 2", 2, {"store", "--overwrite"});
}

TEST_F(BadInputs, AReadOnlyFolder) {
  make_folder(folder_ / "locked");
  const std::string path = folder_ / "locked";
  const bool root = ::geteuid() == 0;
  if (root ? std::system(("chattr +i '" + path + "' 2>/dev/null").c_str())
           : ::chmod(path.c_str(), 0555))
    GTEST_SKIP() << "the superuser writes everywhere and chattr +i does not work on " << path;
  refuses("train '" + kSmoke + "' --data store -o locked/run", 2, {"locked/run"});
  refuses("train '" + kSmoke + "' --data store -o locked", 1, {"locked"});
  refuses("data synth -o locked/store --documents 5 --held-out 2", 2, {"locked/store"});
  EXPECT_EQ(root ? std::system(("chattr -i '" + path + "'").c_str()) : ::chmod(path.c_str(), 0755),
            0);
}

TEST_F(BadInputs, AFullDisk) {
  make_folder(folder_ / "small");
  const std::string path = folder_ / "small";
  if (::mount("tmpfs", path.c_str(), "tmpfs", 0, "size=3m"))
    GTEST_SKIP() << "a file system of its own cannot be mounted here: " << std::strerror(errno);
  const std::string arguments =
      train("small/run", "--set train.steps=60 --set train.checkpoint_every=3 ");
  // Leaves room for one checkpoint
  write_file(folder_ / "small" / "ballast", std::string(2'500'000, 'x'));
  check_message(run(folder_.path(), arguments), 1, {"No space left on device"});
  EXPECT_TRUE(fs::exists(folder_ / "small" / "run" / "checkpoints" / "step-3" / "state.json"));
  EXPECT_EQ(read_file(folder_ / "small" / "ballast").size(), 2'500'000u);
  fs::remove(folder_ / "small" / "ballast");
  // With room for it, the run goes on
  const Outcome again = run(folder_.path(), arguments + "--resume");
  EXPECT_EQ(again.exit_code, 0) << again.error;
  check_message(run(folder_.path(), "data synth -o small/store"), 1, {"No space left on device"});
  EXPECT_FALSE(fs::exists(folder_ / "small" / "store"));
  EXPECT_EQ(::umount(path.c_str()), 0);
}

TEST_F(BadInputs, AFullStandardOutput) {
  if (!fs::exists("/dev/full")) GTEST_SKIP() << "no /dev/full here";
  for (const char* arguments : {"data info store", "--help", "run --help"})
    check_message(run(folder_.path(), fmt::format("{} >/dev/full", arguments)), 1,
                  {"standard output cannot be written"});
}

TEST_F(BadInputs, AFullStandardErrorStopsNothing) {
  if (!fs::exists("/dev/full")) GTEST_SKIP() << "no /dev/full here";
  const Outcome trained = run(folder_.path(), train("full") + " 2>/dev/full");
  EXPECT_EQ(trained.exit_code, 0);
  EXPECT_NE(trained.out.find("20 steps"), std::string::npos) << trained.out;
  EXPECT_EQ(run(folder_.path(), "data info nope 2>/dev/full").exit_code, 2);
  EXPECT_EQ(run(folder_.path(), "data nope 2>/dev/full").exit_code, 2);
}

TEST_F(BadInputs, AClosedDescriptorIsNotThatOfTheNextFile) {
  EXPECT_EQ(run(folder_.path(), train("closed") + " 2>&-").exit_code, 0);
  EXPECT_EQ(read_file(folder_ / "closed" / ".lock").find("step"), std::string::npos);
  folder_.write("text/a/1.txt", "the first domain of a text\n");
  EXPECT_EQ(
      run(folder_.path(), "data prepare --tokenizer none -o new --domain 'a=text/a/*' text 2>&-")
          .exit_code,
      run(folder_.path(), "data prepare --tokenizer none -o new --domain 'a=text/a/*' text")
          .exit_code);
  EXPECT_EQ(run(folder_.path(), "nope 2>&-").exit_code, 2);
  check_message(run(folder_.path(), "data info store >&-"), 1,
                {"standard output cannot be written"});
  EXPECT_EQ(run(folder_.path(), "data info store <&-").exit_code, 0);
}

}  // namespace
}  // namespace assay::cli
