// What is kept for each branch lies in arrays in this order, which is that of the gates.
#pragma once

namespace nsa {

enum BranchIndex { kCompressed, kSelected, kWindow, kBranches };

}  // namespace nsa
