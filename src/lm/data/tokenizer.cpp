#include "lm/data/tokenizer.h"

#include <fmt/core.h>

#include "base/error.h"
#include "base/files.h"

#ifdef NSA_HAVE_SENTENCEPIECE
#include <sentencepiece_processor.h>
#endif

namespace nsa::lm {
namespace {

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
    const auto status = processor_.LoadFromSerializedProto(read(path));  // Load() would read a device without end
    if (!status.ok()) throw base::Error(fmt::format("tokenizer {}: {}", path, status.ToString()));
    if (!own_end && processor_.eos_id() < 0) {
      throw base::Error(fmt::format("tokenizer {}: has no token for the end of a text (eos)", path));
    }
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

 private:
  static std::string read(const std::string& path) {
    try {
      return base::read_regular_text(path, base::Links::kFollow);
    } catch (const base::Error& error) {
      throw base::Error(fmt::format("tokenizer {}", error.what()));
    }
  }

  sentencepiece::SentencePieceProcessor processor_;
  bool own_end_;
};
#endif

std::unique_ptr<Tokenizer> make(const std::string& name, [[maybe_unused]] bool own_end) {
  if (name == "bytes") return std::make_unique<ByteTokenizer>();
#ifdef NSA_HAVE_SENTENCEPIECE
  return std::make_unique<SentencePieceTokenizer>(name, own_end);
#else
  throw base::Error(
      fmt::format("tokenizer = '{}': this program was built without SentencePiece, so it must be bytes (install "
                  "libsentencepiece-dev and build again to use a SentencePiece model)",
                  name));
#endif
}

}  // namespace

std::unique_ptr<Tokenizer> make_tokenizer(const std::string& name) { return make(name, /*own_end=*/true); }

std::unique_ptr<Tokenizer> make_tokenizer(const std::string& name, int vocab_size, bool pretrained) {
  auto tokenizer = make(name, !pretrained);
  const bool padded = pretrained && !tokenizer->is_byte_level() && tokenizer->vocab_size() < vocab_size;
  if (tokenizer->vocab_size() != vocab_size && !padded) {
    throw base::Error(fmt::format("tokenizer {}: has {} tokens, the model was trained with {}", name,
                                  tokenizer->vocab_size(), vocab_size));
  }
  return tokenizer;
}

}  // namespace nsa::lm
