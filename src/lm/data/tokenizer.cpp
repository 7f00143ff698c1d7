#include "lm/data/tokenizer.h"

#include <fmt/core.h>

#include "base/error.h"

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
/// The model's pieces and one more token for the end of a document.
class PieceTokenizer : public Tokenizer {
 public:
  explicit PieceTokenizer(const std::string& path) {
    const auto status = processor_.Load(path);
    if (!status.ok()) throw Error(fmt::format("tokenizer {}: {}", path, status.ToString()));
  }
  std::vector<std::int32_t> encode(std::string_view text) const override {
    std::vector<int> pieces;
    const auto status = processor_.Encode({text.data(), text.size()}, &pieces);
    if (!status.ok()) throw Error(fmt::format("tokenizer: {}", status.ToString()));
    return {pieces.begin(), pieces.end()};
  }
  std::string decode(std::int32_t token) const override {
    if (token >= processor_.GetPieceSize() || processor_.IsControl(token)) return {};
    if (processor_.IsByte(token)) {  // spelt <0x0A>
      return {static_cast<char>(std::stoi(processor_.IdToPiece(token).substr(3, 2), nullptr, 16))};
    }
    constexpr std::string_view kSpace = "\xe2\x96\x81";  // how SentencePiece writes a space
    std::string span = processor_.IdToPiece(token);
    for (std::size_t at = 0; (at = span.find(kSpace, at)) != std::string::npos; ++at) {
      span.replace(at, kSpace.size(), " ");
    }
    return span;
  }
  int vocab_size() const override { return processor_.GetPieceSize() + 1; }
  std::int32_t end_of_document() const override { return processor_.GetPieceSize(); }
  bool is_byte_level() const override { return false; }

 private:
  sentencepiece::SentencePieceProcessor processor_;
};
#endif

}  // namespace

std::unique_ptr<Tokenizer> make_tokenizer(const std::string& name) {
  if (name == "bytes") return std::make_unique<ByteTokenizer>();
#ifdef NSA_HAVE_SENTENCEPIECE
  return std::make_unique<PieceTokenizer>(name);
#else
  throw Error(
      fmt::format("tokenizer = '{}': this program was built without SentencePiece, so it must be bytes (install "
                  "libsentencepiece-dev and build again to use a SentencePiece model)",
                  name));
#endif
}

std::unique_ptr<Tokenizer> make_tokenizer(const std::string& name, int vocab_size) {
  auto tokenizer = make_tokenizer(name);
  if (tokenizer->vocab_size() != vocab_size) {
    throw Error(fmt::format("tokenizer {}: has {} tokens, the model was trained with {}", name, tokenizer->vocab_size(),
                            vocab_size));
  }
  return tokenizer;
}

}  // namespace nsa::lm
