// nsa train: starts a run folder from data and options, or resumes it from its last checkpoint.
#include <fmt/core.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <limits>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/names.h"
#include "cli/commands.h"
#include "cli/options.h"
#include "lm/data/tokenizer.h"
#include "lm/model/counts.h"
#include "lm/run/pretrained.h"
#include "lm/train/trainer.h"

namespace nsa::cli {
namespace {

using lm::AttentionKind;

/// The options of `nsa train`, and which field of config.json each one sets.
class TrainCommand {
 public:
  TrainCommand(CLI::App& app, const lm::Ranks& ranks)
      : command_(*app.add_subcommand("train", "Train a language model.")), execution_{.ranks = ranks} {
    command_.add_option("-o,--out", out_, "Run folder for configuration, checkpoint and metrics")->required();
    command_.add_option("--config", config_file_,
                        "TOML file of options, e.g. lr = 0.001; the command line overrides it");
    fields_.emplace_back(
        command_.add_option(
            "--init", config_.train.init,
            "Start from the model and weights in a transformers folder (LlamaForCausalLM, Qwen3ForCausalLM, "
            "NsaLlamaForCausalLM or NsaQwen3ForCausalLM)"),
        "init");
    command_.add_flag("--resume", resume_, "Resume the run in --out from its last checkpoint");
    command_.add_flag("--overwrite", overwrite_, "Delete the run in --out and start from step 0");
    command_.add_flag("--equal-parameters", equal_parameters_,
                      "Widen the feed-forward layers to the parameter count of --attention nsa");
    add_data_options();
    add_model_options();
    add_length_options();
    add_training_options();
    command_.callback([this] { run(); });
  }

 private:
  template <class T>
  CLI::Option* option(const std::string& name, const char* field, T& value, const std::string& help) {
    CLI::Option* const added = command_.add_option(name, value, help)->group(group_);
    if constexpr (std::is_same_v<T, std::vector<int>>) {
      added->delimiter(',');
    } else if constexpr (!std::is_same_v<T, std::vector<std::string>>) {
      added->take_last();  // a later one overrides
    }
    fields_.emplace_back(added, field);
    return added;
  }
  /// Adds an option with a different default on CUDA.
  template <class T>
  CLI::Option* option(const std::string& name, const char* field, T& value, const std::string& help, const T& on_cuda) {
    CLI::Option* const added = option(name, field, value, help);
    device_.on_cuda(added, value, on_cuda);
    return added;
  }
  CLI::Option* flag(const std::string& name, const char* field, bool& value, const std::string& help) {
    CLI::Option* const added = command_.add_flag(name, value, help)->group(group_);
    fields_.emplace_back(added, field);
    return added;
  }

  void add_data_options() {
    auto& data = config_.data;
    group_ = "Data";
    auto* const paths = option("--data", "paths", data.paths,
                               "Files or folders: text, .jsonl with a field text, .bin with token numbers, each also "
                               ".gz; default: the Python sources of this machine");
    option("--ids", "ids", data.ids, "File with one document per line, as token ids, in place of --data")
        ->excludes(paths);
    option("--vocab-size", "vocab_size", data.vocab_size,
           "Vocabulary size of data that are token numbers: --ids, or .bin (uint16 up to 65536, else uint32)")
        ->check(CLI::Range(2, 1 << 20))
        ->default_str("");
    option("--extension", "extensions", data.extensions, "File extensions taken from folders, e.g. .py; default: all");
    flag("--concat-by-folder", "concat_by_folder", data.concat_by_folder,
         "Concatenate the files of each first-level folder into documents; always on for the default data");
    option("--document-bytes", "document_bytes", data.document_bytes,
           "Target size of a concatenated document, bytes; it ends with the file that reaches it")
        ->check(CLI::Range(1, std::numeric_limits<int>::max()));
    option("--held-out-percent", "held_out_percent", data.held_out_percent,
           "Percentage of documents held out for evaluation, chosen by hash; with few documents, of each one's tokens")
        ->check(CLI::Range(0, 100));
    option(
        "--retrieval-fraction", "retrieval_fraction", config_.train.retrieval_fraction,
        "Fraction of the training tokens in key-value lines for associative recall, 0 to 0.5. Each line (NAME = VALUE) "
        "is repeated within its sequence. nsa needle evaluates this skill");
    option(
        "--retrieval-kinds", "retrieval_kinds", config_.train.retrieval_kinds,
        "Kinds of key-value lines, comma-separated: single; multivalue (several values of a name); tracking (a value "
        "is the name of another line)")
        ->delimiter(',')
        ->check(CLI::IsMember(lm::known_retrieval_kinds()));
    tokenizer_ =
        option("--tokenizer", "tokenizer", data.tokenizer,
               "Tokenizer: bytes, or the path of a SentencePiece model or, with python -m nsa, of a tokenizer.json");
  }

  void add_model_options() {
    auto& model = config_.model;
    const auto cuda = lm::default_run_config("cuda");
    group_ = "Model";
    option("--attention", "attention", attention_, "Attention: nsa, full or window");
    flag("--gated", "gated", model.gated,
         "Add a sigmoid gate to each head's output, as on the branches of nsa, to full or window attention");
    option("--layers", "num_layers", model.num_layers, "Number of layers", cuda.model.num_layers);
    option("--hidden-size", "hidden_size", model.hidden_size, "Hidden size, channels", cuda.model.hidden_size);
    option("--heads", "num_heads", model.num_heads, "Number of query heads", cuda.model.num_heads);
    option("--kv-heads", "num_kv_heads", model.num_kv_heads, "Number of key/value heads", cuda.model.num_kv_heads);
    option("--head-dim", "head_dim", model.head_dim, "Head dimension of queries and keys", cuda.model.head_dim);
    v_head_dim_ =
        option("--v-head-dim", "v_head_dim", model.v_head_dim, "Head dimension of values; default: --head-dim");
    v_head_dim_->default_str("");
    ffn_size_ = option("--ffn-size", "ffn_size", model.ffn_size,
                       "Intermediate size of the feed-forward layers, channels; default: 3 x --hidden-size");
    ffn_size_->default_str("");
    flag("--qk-norm", "qk_norm", model.qk_norm, "Apply RMSNorm to each head's queries and keys, before RoPE");
    option("--rope-theta", "rope_theta", model.rope_theta, "RoPE base (theta)");
    option(
        "--partial-rotary-factor", "partial_rotary_factor", model.rope.partial_rotary_factor,
        "Rotary fraction: share of each head's channels that RoPE rotates, 0 to 1; default: 0.5 with --preset recipe "
        "and --attention nsa, else 1");
    option("--norm-eps", "norm_eps", model.norm_eps, "Epsilon of RMSNorm, added to the mean square");
    group_ = "Sparse attention";
    preset_option_ =
        command_
            .add_option(
                "--preset", preset_,
                "Default values of the next four options, --share-kv, --rope-theta and --partial-rotary-factor: "
                "recipe, or paper (32, 16, 64, 16, --separate-kv, 10000, 1)")
            ->group(group_)
            ->take_last();
    option("--kernel-size", "kernel_size", model.nsa.kernel_size, "Compression block size l, tokens");
    option("--kernel-stride", "kernel_stride", model.nsa.kernel_stride, "Compression stride d, tokens");
    option("--block-size", "block_size", model.nsa.block_size, "Selection block size l', tokens");
    option("--topk", "topk", model.nsa.topk, "Selected blocks per query n, forced blocks included");
    option("--init-blocks", "init_blocks", model.nsa.init_blocks, "Number of first blocks that are always selected");
    option("--local-blocks", "local_blocks", model.nsa.local_blocks,
           "Number of most recent blocks that are always selected");
    option("--window-size", "window_size", model.nsa.window_size, "Sliding window size w, tokens");
    option("--phi", "phi", phi_, "Compression function phi: mean, linear or mlp");
    option("--phi-hidden", "phi_hidden", model.phi_hidden, "Hidden units of phi mlp, E; 0: 2 x head dimension");
    flag("--phi-per-kv-head", "phi_per_kv_head", model.phi_per_kv_head,
         "Use separate phi weights for each key/value head");
    flag("--share-kv,!--separate-kv", "share_kv", model.share_kv,
         "Share one key and one value projection between the three branches; --separate-kv: one per branch");
    option("--dense-layers", "dense_layers", model.dense_layers,
           "Indices of the layers with full attention, from 0, comma-separated, e.g. 0,3")
        ->default_str("");
    option("--noise", "noise", config_.train.noise,
           "Initial scale of the exploration noise on the log-importances of block selection");
    option("--noise-until", "noise_until", config_.train.noise_until, "Fraction of the run after which the noise is 0");
    option("--gate-balance", "gate_balance", config_.train.gate_balance,
           "Weight of the penalty on gates that neglect a branch");
    selector_loss_ =
        option("--selector-loss", "selector_loss", config_.train.selector_loss,
               "Weight of the loss that trains the block selector: KL to the selected branch's attention. Default: 0.1 "
               "with --preset recipe, --share-kv and phi linear or mlp, else 0");
    selector_loss_->default_str("");
    option(
        "--selector-queries", "selector_queries", config_.train.selector_queries,
        "Queries per batch and layer in the selector loss; 0: one per 256 tokens, 16 to 128, fewer in long contexts");
  }

  void add_length_options() {
    auto& train = config_.train;
    group_ = "Length of the run (at most one of these; default: --minutes 3)";
    option("--steps", "steps", train.steps, "Number of optimizer steps");
    option("--tokens", "tokens", train.tokens, "Number of training tokens, rounded up to whole steps");
    option("--minutes", "minutes", train.minutes,
           "Training time, minutes; the throughput of the first tenth sets the number of steps");
  }

  void add_training_options() {
    auto& train = config_.train;
    const auto cuda = lm::default_run_config("cuda");
    group_ = "Training";
    device_.add(command_);
    option("--context", "context", train.context, "Maximum sequence length, tokens", cuda.train.context);
    option("--context-warmup", "context_warmup", train.context_warmup,
           "Initial sequence length, tokens. It doubles until it reaches --context halfway through the run. 0: always "
           "--context. Needs --steps or --tokens");
    option("--batch-size", "batch_size", train.batch_size, "Rows of --context tokens per batch", cuda.train.batch_size);
    grad_accum_ = option("--grad-accum", "grad_accum", train.grad_accum,
                         "Gradient accumulation: batches per step over all ranks; default: one per rank");
    option("--lr", "lr", train.lr, "Peak learning rate of AdamW", cuda.train.lr);
    option("--min-lr-ratio", "min_lr_ratio", train.min_lr_ratio,
           "Final learning rate of the cosine schedule, as a fraction of --lr");
    option("--warmup-steps", "warmup_steps", train.warmup_steps, "Number of linear warm-up steps",
           cuda.train.warmup_steps);
    option("--weight-decay", "weight_decay", train.weight_decay, "Weight decay of the matrices");
    option("--beta1", "beta1", train.beta1, "Decay of AdamW's first moment");
    option("--beta2", "beta2", train.beta2, "Decay of AdamW's second moment");
    option("--clip", "clip", train.clip, "Maximum gradient norm; 0: no clipping");
    option("--phi-lr-scale", "phi_lr_scale", train.phi_lr_scale,
           "Learning rate of phi as a multiple of --lr; 0: by fan-in, 128 / (l * D) for its first matrix");
    option("--seed", "seed", train.seed, "Seed of weights, data order and noise");
    option("--dtype", "dtype", train.dtype,
           "Data type of matmuls and attention: auto (bfloat16 if the device has instructions for it), float32 or "
           "bfloat16");
    flag("--recompute", "recompute", train.recompute,
         "Activation checkpointing: keep only layer inputs and recompute the rest in the backward pass");
    option("--threads", "threads", train.threads, "Number of CPU threads; 0: one per core");
    command_
        .add_flag("--shard-optimizer", execution_.shard_optimizer,
                  "Shard AdamW's moments over the ranks: less memory, bitwise equal results")
        ->group(group_);
    option("--log-every", "log_every", train.log_every, "Interval between lines in metrics.jsonl, steps");
    option("--eval-every", "eval_every", train.eval_every, "Interval between evaluations, steps; 0: only at the end");
    option("--eval-tokens", "eval_tokens", train.eval_tokens, "Number of held-out tokens per evaluation; 0: all",
           cuda.train.eval_tokens);
    option("--save-every", "save_every", train.save_every, "Interval between checkpoints, steps; 0: only at the end",
           cuda.train.save_every);
  }

  /// Reads model and tokenizer from --init.
  void take_over() {
    auto& init = config_.train.init;
    const nlohmann::json model = config_.model;
    for (const auto& [option, field] : fields_) {
      if (option->count() > 0 && (model.contains(field) || field == "attention" || field == "phi")) {
        throw base::Error(fmt::format("{} and --init exclude each other", option->get_name()));
      }
    }
    if (equal_parameters_) throw base::Error("--equal-parameters and --init exclude each other");
    if (preset_option_->count() > 0) throw base::Error("--preset and --init exclude each other");
    const lm::PretrainedFolder folder(init);
    config_.model = folder.config();
    init = std::filesystem::absolute(init).string();
    auto& data = config_.data;
    const auto is_numbers = [](const std::string& path) { return path.ends_with(".bin") || path.ends_with(".bin.gz"); };
    if (!data.ids.empty() || std::any_of(data.paths.begin(), data.paths.end(), is_numbers)) {
      data.vocab_size = config_.model.vocab_size;
    }
    if (tokenizer_->count() > 0 || data.holds_tokens()) return;
    if (!folder.tokenizer().empty()) {
      config_.data.tokenizer = std::filesystem::absolute(folder.tokenizer()).string();
    } else if (config_.model.vocab_size != lm::make_tokenizer("bytes")->vocab_size()) {
      throw base::Error(fmt::format("{}: no tokenizer: pass one with --tokenizer, or token numbers with --ids", init));
    }
  }

  /// Sets the fields that were not given from the preset.
  void take_preset() {
    const nlohmann::json preset = lm::with_preset(config_.model, preset_);
    nlohmann::json model = config_.model;
    for (const auto& [option, field] : fields_) {
      if (option->count() == 0 && model.contains(field)) model[field] = preset[field];
    }
    config_.model = model.get<lm::ModelConfig>();
  }

  /// Sets the defaults that depend on other options.
  void complete() {
    auto& model = config_.model;
    model.attention = lm::attention_kind(attention_);
    model.phi = base::compression_kind(phi_);
    take_preset();
    if (v_head_dim_->count() == 0) model.v_head_dim = model.head_dim;
    if (ffn_size_->count() == 0) model.ffn_size = 3 * model.hidden_size;
    auto& train = config_.train;
    const bool trains_selector = model.attention == AttentionKind::kNsa && preset_ == "recipe" && train.init.empty() &&
                                 model.share_kv && model.phi != CompressionKind::kMean;
    if (selector_loss_->count() == 0 && trains_selector) train.selector_loss = 0.1;
    if (grad_accum_->count() == 0) train.grad_accum = execution_.ranks.size();
    if (train.steps == 0 && train.tokens == 0 && train.minutes == 0) train.minutes = 3;
    if (equal_parameters_) model.ffn_size = equal_ffn_size(model);
  }

  /// The feed-forward size of --equal-parameters for this model.
  int equal_ffn_size(lm::ModelConfig model) const {
    model.ffn_size = ffn_size_->count() > 0 ? config_.model.ffn_size : 3 * model.hidden_size;
    lm::ModelConfig sparse = model;
    sparse.attention = AttentionKind::kNsa;
    return lm::ffn_size_of_equal_parameters(model, sparse);
  }

  /// The fields that were given on the command line.
  nlohmann::json given() const {
    const nlohmann::json all = config_;
    nlohmann::json fields = nlohmann::json::object();
    for (const auto& [option, field] : fields_) {
      if (option->count() == 0) continue;
      for (const char* section : {"model", "train", "data"}) {
        if (all[section].contains(field)) fields[field] = all[section][field];
      }
    }
    return fields;
  }

  lm::TrainResult start() {
    const auto device = device_.choose();
    complete();
    if (!config_.train.init.empty()) take_over();
    return lm::train({.out = out_,
                      .config = config_,
                      .options = toml_of(command_),
                      .device = device,
                      .overwrite = overwrite_,
                      .execution = execution_});
  }

  lm::TrainResult resume() {
    if (preset_option_->count() > 0) throw base::Error("--preset and --resume exclude each other");
    config_.model.attention = lm::attention_kind(attention_);
    config_.model.phi = base::compression_kind(phi_);
    auto fields = given();
    if (!device_.named().empty()) fields["device"] = device_.named();
    if (equal_parameters_) {  // of the run's model: its defaults were those of its device
      fields["ffn_size"] = equal_ffn_size(lm::read_run_config(out_ + "/config.json").model);
    }
    return lm::resume(out_, fields, execution_);
  }

  /// Refuses torchrun: its processes would all train the same model.
  void refuse_unshared() const {
    const char* const size = std::getenv("WORLD_SIZE");
    if (execution_.ranks.size() > 1 || size == nullptr || std::string_view(size) == "1") return;
    throw base::Error(fmt::format("WORLD_SIZE = {}: run several ranks with torchrun ... -m nsa.train", size));
  }

  void run() {
    if (resume_ && overwrite_) throw base::Error("--resume and --overwrite exclude each other");
    refuse_unshared();
    const auto result = resume_ ? resume() : start();
    if (!execution_.ranks.first()) throw Exit{result.signal == 0 ? 0 : 128 + result.signal};
    if (result.signal != 0) {
      fmt::print("stopped at step {}; saved in {}; resume with --resume\n", result.step, out_);
      throw Exit{128 + result.signal};
    }
    fmt::print("done: {} steps, {} tokens, saved in {}\n", result.step, result.tokens, out_);
  }

  CLI::App& command_;
  std::string group_;
  std::string out_, config_file_, attention_ = "nsa", phi_ = "mlp", preset_ = "recipe";
  bool resume_ = false, overwrite_ = false, equal_parameters_ = false;
  lm::RunConfig config_ = lm::default_run_config("cpu");
  lm::Execution execution_;
  DeviceOption device_;
  CLI::Option* grad_accum_ = nullptr;
  CLI::Option* preset_option_ = nullptr;
  CLI::Option* selector_loss_ = nullptr;
  CLI::Option* tokenizer_ = nullptr;
  CLI::Option* v_head_dim_ = nullptr;
  CLI::Option* ffn_size_ = nullptr;
  std::vector<std::pair<CLI::Option*, std::string>> fields_;
};

}  // namespace

void add_train(CLI::App& app, const lm::Ranks& ranks) {
  // The callback refers to the command, which therefore lives as long as the program.
  static std::unique_ptr<TrainCommand> command;
  command = std::make_unique<TrainCommand>(app, ranks);
}

}  // namespace nsa::cli
