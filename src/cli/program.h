// The program as a library, libnsa_program: `nsa` calls it, and so do python -m nsa and, on every
// rank, python -m nsa.train.
#pragma once

extern "C" {

/// Before nsa_program(): how this process reads a tokenizer.json, by an nsa::lm::TokenizerFunctions.
__attribute__((visibility("default"))) void nsa_program_tokenizers(const void* functions);

/// Runs the program once in this process. `group`: name of torch's process group whose ranks train together; null: this
/// process alone. Returns the exit code: 0 done, 1 failed, 2 the arguments or the files they name are at fault, 128 +
/// signal.
__attribute__((visibility("default"))) int nsa_program(int argc, char** argv, const char* group);

/// "VERSION TORCH": of this library and of the LibTorch that it was built with, which the process must have.
__attribute__((visibility("default"))) const char* nsa_program_versions();
}
