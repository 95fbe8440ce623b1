// A configuration that cannot work is refused with the name of the mixer, the field and its value.
#include <torch/torch.h>

#include "nn/mixer.h"
#include "testing.h"

namespace assay::nn {
namespace {

struct Wrong {
  // `field` is what the error must hold
  const char* mixer;
  const char* table;
  const char* field;
};

const Wrong kWrong[] = {
    {"attention", "num_heads = 7", "num_heads = 7"},
    {"attention", "num_heads = 4\nnum_kv_heads = 3", "num_kv_heads = 3"},
    {"attention", "window = 0", "window = 0"},
    {"attention", "gate = \"channel\"", "gate = 'channel'"},
    {"attention", "rotary_fraction = 0.0", "rotary_fraction = 0"},
    {"attention", "temperature = 0.5", "temperature = 0.5"},
    {"attention", "constants = \"key\"", "constants = 'key'"},
    {"attention", "qk_norm = true\ninitial_scale = 0.0", "initial_scale = 0"},
    {"attention", "scale_learning_rate = -1.0", "scale_learning_rate = -1"},
    {"attention", "qk_rmsnorm = \"heads\"", "qk_rmsnorm = 'heads'"},
    {"attention", "qk_rmsnorm = \"head\"\nqk_norm = true", "qk_rmsnorm = 'head'"},
    {"attention", "norm_eps = 0.0", "norm_eps = 0"},
    {"attention", "softmax_scale = -1.0", "softmax_scale = -1"},
    {"attention", "softmax_scale = 1.0\nqk_norm = true", "softmax_scale = 1"},
    {"top1_element", "num_heads = 7", "num_heads = 7"},
    {"top1_element", "head_dim = 7", "head_dim = 7"},
    {"top1_element", "initial_scale = -2.0", "initial_scale = -2"},
    {"top1_chunk", "num_heads = 0", "num_heads = 0"},
    {"top1_chunk", "chunk_size = 0", "chunk_size = 0"},
    {"top1_chunk", "top_k = 0", "top_k = 0"},
    {"top1_chunk", "selection = \"aprox\"", "selection = 'aprox'"},
    {"nsa", "num_kv_heads = 3", "num_kv_heads = 3"},
    {"nsa", "head_dim = 7", "head_dim = 7"},
    {"nsa", "compress_stride = 12", "compress_stride = 12"},
    {"nsa", "block_size = 16", "block_size = 16"},
    {"nsa", "num_blocks = 2", "num_blocks = 2"},
    {"nsa", "window = 0", "window = 0"},
    {"block_selection", "num_heads = 7", "num_heads = 7"},
    {"block_selection", "num_kv_heads = 3", "num_kv_heads = 3"},
    {"block_selection", "chunk_size = 0", "chunk_size = 0"},
    {"block_selection", "top_k = 0", "top_k = 0"},
    {"block_selection", "pooling = \"sum\"", "pooling = 'sum'"},
    {"block_selection", "index_heads = 3", "index_heads = 3"},
    {"block_selection", "index_dim = 7", "index_dim = 7"},
    {"block_selection", "loss_weight = 0.0", "loss_weight = 0"},
    {"mamba1", "state_size = 0", "state_size = 0"},
    {"mamba1", "decay = \"half\"", "decay = 'half'"},
    {"mamba1", "expand = 0", "expand = 0"},
    {"mamba2", "head_dim = 7", "head_dim = 7"},
    {"mamba2", "head_dim = 0", "head_dim = 0"},
    {"mamba2", "head_dim = 16\nnum_groups = 5", "num_groups = 5"},
    {"mamba2", "head_dim = 16\ndecay = \"learnable\"", "decay = 'learnable'"},
    {"longhorn", "state_size = 0", "state_size = 0"},
    {"gla", "num_heads = 7", "num_heads = 7"},
    {"retention", "num_heads = 7", "num_heads = 7"},
    {"delta_net", "num_heads = 7", "num_heads = 7"},
    {"gated_delta_net", "num_heads = 7", "num_heads = 7"},
    {"gated_delta_net", "num_heads = 4\nnum_key_heads = 3", "num_key_heads = 3"},
    {"kda", "num_heads = 7", "num_heads = 7"},
    {"kda", "gate_bound = 5.0", "gate_bound = 5"},
    {"gdn2", "num_heads = 7", "num_heads = 7"},
    {"comba", "num_heads = 7", "num_heads = 7"},
    {"gated_delta_product", "num_heads = 7", "num_heads = 7"},
    {"gated_delta_product", "num_steps = 0", "num_steps = 0"},
    {"gated_delta_product", "num_heads = 4\nnum_key_heads = 3", "num_key_heads = 3"},
    {"mamba3", "head_dim = 7", "head_dim = 7"},
    {"mamba3", "head_dim = 16\nnum_groups = 5", "num_groups = 5"},
    {"mamba3", "head_dim = 16\nrotary_fraction = 1.5", "rotary_fraction = 1.5"},
    {"mamba3", "head_dim = 16\nstate_size = 2", "state_size = 2"},
    {"mamba3", "head_dim = 16\ndecay = \"relu\"", "decay = 'relu'"},
    {"forgetting_attention", "num_heads = 7", "num_heads = 7"},
    {"forgetting_attention", "num_kv_heads = 3", "num_kv_heads = 3"},
    {"base_conv", "form = \"lfm3\"", "form = 'lfm3'"},
    {"taylor_attention", "num_heads = 7", "num_heads = 7"},
    {"rwkv5", "num_heads = 7", "num_heads = 7"},
    {"rwkv6", "num_heads = 7", "num_heads = 7"},
    {"rwkv7", "num_heads = 7", "num_heads = 7"}};

TEST(MixerRefusals, NameTheFieldAndItsValue) {
  for (const Wrong& wrong : kWrong) {
    SCOPED_TRACE(testing::Message() << wrong.mixer << ": " << wrong.table);
    try {
      mixers().at(wrong.mixer).make(ConfigNode::parse(wrong.table), /*d_model=*/48);
      ADD_FAILURE() << "was accepted";
    } catch (const BadInput& error) {
      const std::string text = error.what();
      EXPECT_TRUE(text.starts_with(std::string(wrong.mixer) + ": ")) << text;
      EXPECT_NE(text.find(wrong.field), std::string::npos) << text;
    }
  }
}

// A width that no kernel serves, in every mixer with a convolution.
TEST(MixerRefusals, ConvolutionsOfUpToEightTaps) {
  for (const char* mixer : {"mamba1", "mamba2", "longhorn", "delta_net", "gated_delta_net",
                            "gated_delta_product", "kda", "gdn2", "comba", "base_conv"})
    for (const int width : {-1, 9}) try {
        mixers().at(mixer).make(ConfigNode::parse(fmt::format("conv_width = {}", width)), 64);
        ADD_FAILURE() << mixer << " was accepted with conv_width = " << width;
      } catch (const BadInput& error) {
        EXPECT_NE(std::string(error.what()).find(fmt::format("conv_width = {}", width)),
                  std::string::npos)
            << mixer;
      }
}

}  // namespace
}  // namespace assay::nn
