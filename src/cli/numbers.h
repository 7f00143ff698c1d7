// What the numbers of all options have in common.
#pragma once

namespace CLI {
class App;
}

namespace nsa::cli {

/// For every option of `app` and its subcommands: integers must fit their type, other numbers must be finite. CLI11
/// takes the nearest integer there is, lets an unsigned one wrap around, and takes nan and inf.
void refuse_unrepresentable_numbers(CLI::App& app);

}  // namespace nsa::cli
