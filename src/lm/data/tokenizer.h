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
  /// A prompt begins with the start of a document, too.
  virtual bool begins_prompts() const { return true; }
  /// One token is one byte of text.
  virtual bool is_byte_level() const = 0;
  /// Of its file; 0: it has none.
  virtual std::uint64_t fingerprint() const { return 0; }
};

/// The package `tokenizers`, for a tokenizer.json, in a process of Python. A function emits its result and returns
/// true, or an error's text and false. Several threads may call.
struct TokenizerFunctions {
  using Emit = void (*)(void* sink, const char* bytes, std::int64_t size);
  /// Of the content of tokenizer.json and of tokenizer_config.json or "": JSON with "handle", "vocab_size" and, -1
  /// where the second names none, "start" and "end"; and "begins_prompts", whether the tokenizer puts "start" first.
  bool (*open)(const char* tokenizer, const char* config, Emit emit, void* sink);
  bool (*encode)(std::int64_t handle, const char* text, std::int64_t size, Emit emit, void* sink);  // int32 numbers
  bool (*decode)(std::int64_t handle, std::int32_t token, Emit emit, void* sink);                   // bytes
};
void use_tokenizers(const TokenizerFunctions& functions);

/// "bytes": 256 bytes and the end of a document; else the path of a SentencePiece model or, after use_tokenizers(), of
/// a tokenizer.json. Throws Error when the file cannot be read, or when the program was built without SentencePiece.
std::unique_ptr<Tokenizer> make_tokenizer(const std::string& name);
/// The tokenizer of a trained model, whose vocabulary it must have. `pretrained`: by another program, which takes the
/// tokenizer's own tokens for the start and the end of a document, and whose vocabulary may be larger.
std::unique_ptr<Tokenizer> make_tokenizer(const std::string& name, int vocab_size, bool pretrained);

}  // namespace nsa::lm
