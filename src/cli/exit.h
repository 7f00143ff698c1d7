// How a subcommand ends the program with a code other than 0 that is not an error.
#pragma once

namespace nsa::cli {

struct Exit {
  int code;
};

}  // namespace nsa::cli
