// Text to tokens and back.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace nsa::lm {

/// Several threads may use one.
class Tokenizer {
 public:
  virtual ~Tokenizer() = default;
  virtual std::vector<std::int32_t> encode(std::string_view text) const = 0;
  /// The bytes of a token; the end-of-document token has none.
  virtual std::string decode(std::int32_t token) const = 0;
  virtual int vocab_size() const = 0;
  /// Ends every document.
  virtual std::int32_t end_of_document() const = 0;
  /// Begins every document.
  virtual std::int32_t start_of_document() const { return end_of_document(); }
  /// One token is one byte of text.
  virtual bool is_byte_level() const = 0;
};

/// "bytes": 256 bytes and the end of a document; else the path of a SentencePiece model. Throws Error when the file
/// cannot be read, or when the program was built without SentencePiece.
std::unique_ptr<Tokenizer> make_tokenizer(const std::string& name);
/// The tokenizer of a trained model, whose vocabulary it must have. `pretrained`: by another program, which takes the
/// SentencePiece model's own tokens for the start and the end of a document, and whose vocabulary may be larger.
std::unique_ptr<Tokenizer> make_tokenizer(const std::string& name, int vocab_size, bool pretrained);

}  // namespace nsa::lm
