// Checks that the arguments of all options have in common.
#pragma once

namespace CLI {
class App;
}

namespace nsa::cli {

/// For every option of `app` and its subcommands: integers must fit their type, other numbers must be finite. CLI11
/// takes the nearest integer there is, lets an unsigned one wrap around, and takes nan and inf. A path, a name or a
/// text must not be empty, but for --prompt (a new document) and --extension (of names without one).
void refuse_unusable_arguments(CLI::App& app);

}  // namespace nsa::cli
