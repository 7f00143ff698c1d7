#include "lm/data/tokenizer.h"

#include <fmt/core.h>

#include <cstring>
#include <filesystem>
#include <optional>

#include "base/error.h"
#include "base/files.h"
#include "base/json.h"
#include "base/random.h"

#ifdef NSA_HAVE_SENTENCEPIECE
#include <sentencepiece_processor.h>
#endif

namespace nsa::lm {
namespace {

constexpr const char* kNoEnd = "has no token for the end of a text (eos)";

/// The one text for a tokenizer that cannot be used.
base::Error wrong_tokenizer(const std::string& name, const std::string& reason) {
  return base::Error(fmt::format(
      "tokenizer {}: {}; must be bytes, a SentencePiece model or, with python -m nsa, a tokenizer.json", name, reason));
}

[[maybe_unused]] std::string read_tokenizer(const std::string& path) {
  try {
    return base::read_regular_text(path, base::Links::kFollow);
  } catch (const base::Error& error) {
    throw base::Error(fmt::format("tokenizer {}", error.what()));
  }
}

class ByteTokenizer : public Tokenizer {
 public:
  std::vector<std::int32_t> encode(std::string_view text) const override {
    std::vector<std::int32_t> tokens;
    tokens.reserve(text.size());
    for (const char c : text) tokens.push_back(static_cast<unsigned char>(c));
    return tokens;
  }
  std::string decode(std::int32_t token) const override {
    return token < 256 ? std::string(1, static_cast<char>(token)) : std::string();
  }
  int vocab_size() const override { return 257; }
  std::int32_t end_of_document() const override { return 256; }
  bool is_byte_level() const override { return true; }
};

#ifdef NSA_HAVE_SENTENCEPIECE
/// The model's tokens and one more for the end of a document; or the model's tokens alone.
class SentencePieceTokenizer : public Tokenizer {
 public:
  SentencePieceTokenizer(const std::string& path, bool own_end) : own_end_(own_end) {
    const auto model = read_tokenizer(path);  // Load() would read a device without end
    const auto status = processor_.LoadFromSerializedProto(model);
    if (!status.ok()) throw wrong_tokenizer(path, status.ToString());
    if (!own_end && processor_.eos_id() < 0) throw wrong_tokenizer(path, kNoEnd);
    fingerprint_ = base::hash(model);
  }
  std::vector<std::int32_t> encode(std::string_view text) const override {
    std::vector<int> tokens;
    const auto status = processor_.Encode({text.data(), text.size()}, &tokens);
    if (!status.ok()) throw base::Error(fmt::format("tokenizer: {}", status.ToString()));
    return {tokens.begin(), tokens.end()};
  }
  std::string decode(std::int32_t token) const override {
    if (token >= processor_.GetPieceSize() || processor_.IsControl(token)) return {};
    if (processor_.IsByte(token)) {  // spelt <0x0A>
      return {static_cast<char>(std::stoi(processor_.IdToPiece(token).substr(3, 2), nullptr, 16))};
    }
    constexpr std::string_view kSpace = "\xe2\x96\x81";  // how SentencePiece writes a space
    std::string span = processor_.IdToPiece(token);
    for (std::size_t at = 0; (at = span.find(kSpace, at)) != std::string::npos; ++at) {
      span.replace(at, kSpace.size(), 1, ' ');
    }
    return span;
  }
  int vocab_size() const override { return processor_.GetPieceSize() + (own_end_ ? 1 : 0); }
  std::int32_t end_of_document() const override { return own_end_ ? processor_.GetPieceSize() : processor_.eos_id(); }
  std::int32_t start_of_document() const override {
    return own_end_ || processor_.bos_id() < 0 ? end_of_document() : processor_.bos_id();
  }
  bool is_byte_level() const override { return false; }
  std::uint64_t fingerprint() const override { return fingerprint_; }

 private:
  sentencepiece::SentencePieceProcessor processor_;
  bool own_end_;
  std::uint64_t fingerprint_ = 0;
};
#endif

std::optional<TokenizerFunctions> tokenizers;  // of Python

/// As SentencePieceTokenizer, by the package `tokenizers`.
class JsonTokenizer : public Tokenizer {
 public:
  JsonTokenizer(const std::string& path, bool own_end) : path_(path) {
    const auto text = read_tokenizer(path);
    const auto config = std::filesystem::path(path).parent_path() / "tokenizer_config.json";
    std::error_code error;
    const auto special = !own_end && std::filesystem::exists(config, error) ? read_tokenizer(config.string()) : "";
    const auto opened = base::parse_json(call(tokenizers->open, text.c_str(), special.c_str()), path);
    handle_ = opened["handle"];
    vocab_size_ = opened["vocab_size"].get<int>() + (own_end ? 1 : 0);
    end_ = own_end ? vocab_size_ - 1 : opened["end"].get<int>();
    start_ = own_end || opened["start"] < 0 ? end_ : opened["start"].get<int>();
    begins_prompts_ = own_end || opened["begins_prompts"].get<bool>();
    if (end_ < 0) throw wrong_tokenizer(path, kNoEnd);
    fingerprint_ = base::hash(text);
  }
  std::vector<std::int32_t> encode(std::string_view text) const override {
    const auto bytes = call(tokenizers->encode, handle_, text.data(), static_cast<std::int64_t>(text.size()));
    std::vector<std::int32_t> tokens(bytes.size() / sizeof(std::int32_t));
    std::memcpy(tokens.data(), bytes.data(), tokens.size() * sizeof(std::int32_t));
    return tokens;
  }
  std::string decode(std::int32_t token) const override {
    return token == end_ || token == start_ ? std::string() : call(tokenizers->decode, handle_, token);
  }
  int vocab_size() const override { return vocab_size_; }
  std::int32_t end_of_document() const override { return end_; }
  std::int32_t start_of_document() const override { return start_; }
  bool begins_prompts() const override { return begins_prompts_; }
  bool is_byte_level() const override { return false; }
  std::uint64_t fingerprint() const override { return fingerprint_; }

 private:
  template <class Function, class... Arguments>
  std::string call(Function function, Arguments... arguments) const {
    std::string result;
    const auto append = [](void* sink, const char* bytes, std::int64_t size) {
      static_cast<std::string*>(sink)->append(bytes, static_cast<std::size_t>(size));
    };
    if (!function(arguments..., append, &result)) throw wrong_tokenizer(path_, result);
    return result;
  }

  std::string path_;
  std::int64_t handle_ = 0;
  int vocab_size_ = 0, start_ = 0, end_ = 0;
  bool begins_prompts_ = true;
  std::uint64_t fingerprint_ = 0;
};

std::unique_ptr<Tokenizer> make(const std::string& name, bool own_end) {
  if (name == "bytes") return std::make_unique<ByteTokenizer>();
  if (name.ends_with(".json")) {
    if (!tokenizers) throw wrong_tokenizer(name, "is read by python -m nsa alone, and --ids takes token numbers");
    return std::make_unique<JsonTokenizer>(name, own_end);
  }
#ifdef NSA_HAVE_SENTENCEPIECE
  return std::make_unique<SentencePieceTokenizer>(name, own_end);
#else
  throw wrong_tokenizer(name, "this program was built without SentencePiece (libsentencepiece-dev)");
#endif
}

}  // namespace

void use_tokenizers(const TokenizerFunctions& functions) { tokenizers = functions; }

std::unique_ptr<Tokenizer> make_tokenizer(const std::string& name) { return make(name, /*own_end=*/true); }

std::unique_ptr<Tokenizer> make_tokenizer(const std::string& name, int vocab_size, bool pretrained) {
  auto tokenizer = make(name, !pretrained);
  const bool padded = pretrained && !tokenizer->is_byte_level() && tokenizer->vocab_size() < vocab_size;
  if (tokenizer->vocab_size() != vocab_size && !padded) {
    throw wrong_tokenizer(
        name, fmt::format("has {} tokens, the model was trained with {}", tokenizer->vocab_size(), vocab_size));
  }
  return tokenizer;
}

}  // namespace nsa::lm
