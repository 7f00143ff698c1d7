// The order of arrays with an element for each branch, which is that of the gates.
#pragma once

namespace nsa {

enum BranchIndex { kCompressed, kSelected, kWindow, kBranches };

}  // namespace nsa
