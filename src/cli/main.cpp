// The program `nsa`. Exit codes: 0 done, 1 failed, 2 the arguments or the files they name are at fault.
#include <c10/util/Exception.h>
#include <fmt/core.h>

#include <CLI/CLI.hpp>
#include <exception>
#include <new>
#include <string>

#include "cli/commands.h"
#include "cli/exit.h"
#include "lm/error.h"
#include "nsa/backend.h"

namespace {

/// torch's allocator of host memory has no exception of its own.
bool is_out_of_memory(const c10::Error& error, const std::string& message) {
  return dynamic_cast<const c10::OutOfMemoryError*>(&error) != nullptr ||
         message.find("DefaultCPUAllocator: ") != std::string::npos;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Native Sparse Attention: train, generate, measure and look inside.", "nsa");
  app.set_version_flag("--version", std::string("nsa ") + nsa::version());
  app.require_subcommand(1);
  app.get_formatter()->column_width(40);
  app.option_defaults()->always_capture_default();
  nsa::cli::add_train(app);
  nsa::cli::add_generate(app);
  nsa::cli::add_bench(app);
  nsa::cli::add_info(app);
  nsa::cli::add_eval(app);
  nsa::cli::add_recall(app);
  nsa::cli::add_needle(app);
  nsa::cli::add_inspect(app);
  nsa::cli::add_debug(app);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == 0) return app.exit(error);  // --help, --version
    fmt::print(stderr, "nsa: {}\nSee nsa --help and nsa SUBCOMMAND --help.\n", error.what());
    return 2;
  } catch (const nsa::cli::Exit& exit) {
    return exit.code;
  } catch (const nsa::lm::Error& error) {
    fmt::print(stderr, "nsa: {}\n", error.what());
    return 2;
  } catch (const nsa::lm::Failure& failure) {
    fmt::print(stderr, "nsa: {}\n", failure.what());
    return 1;
  } catch (const std::bad_alloc&) {
    fmt::print(stderr, "nsa: out of memory\n");
    return 1;
  } catch (const c10::Error& error) {
    const std::string message = error.what_without_backtrace();
    fmt::print(stderr, "nsa: {}{}\n",
               is_out_of_memory(error, message) ? "out of memory: " : "internal error: ", message);
    return 1;
  } catch (const std::exception& error) {
    fmt::print(stderr, "nsa: internal error: {}\n", error.what());
    return 1;
  }
  return 0;
}
