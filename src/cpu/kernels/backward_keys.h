// The second half of the backward of attention: one key block against the queries that see it.
#pragma once

#include "cpu/kernels/attention_backward.h"

namespace nsa::cpu::NSA_ISA {

/// One query of the sum over queries and heads: A is p or d_s ([pair][64], tokens are rows), B is d_o or q.
struct KeyTerm {
  const Slot *a, *b;
  int begin, end;  // the rows that it adds to
};

/// sums[token][column] of tokens [row, row + R), `columns` columns, plus all terms in order.
template <class Slots, int R>
void add_terms(const KeyTerm* terms, int count, int row, int pairs, int columns, float* sums) {
  const auto at = [&]<int NV>(int column) {
    const auto place = [&](int r, int c) { return sums + (row + r) * std::ptrdiff_t{columns} + column + c * kWidth; };
    accumulate<R, NV>([&](int r, int c) { return load(place(r, c)); },
                      [&](Vec(&acc)[R][NV]) __attribute__((always_inline)) {
                        for (const KeyTerm* term = terms; term != terms + count; ++term)
                          if (term->begin < row + R && row < term->end)
                            multiply<Slots>(acc, {term->a + row, 1, kBlockTokens}, {term->b + column, columns}, pairs);
                      },
                      [&](int r, int c, Vec sum) { store(place(r, c), sum); });
  };
  int column = 0;
  for (; column + kTileVectors * kWidth <= columns; column += kTileVectors * kWidth)
    at.template operator()<kTileVectors>(column);
  for (; column < columns; column += kWidth) at.template operator()<1>(column);
}

/// d_k or d_v of a block. A term whose query holds a NaN must not touch the tokens that the query does not see, where
/// its factor is zero: it goes row by row.
template <class Slots>
class KeySum {
 public:
  KeySum(int pairs, int columns, float* sums) : pairs_(pairs), columns_(columns), sums_(sums) {}
  KeySum(const KeySum&) = delete;
  ~KeySum() { flush(); }

  void add(const KeyTerm& term, bool nonfinite) {
    if (nonfinite && term.end - term.begin < kBlockTokens) {
      flush();
      for (int row = term.begin; row < term.end; ++row) add_terms<Slots, 1>(&term, 1, row, pairs_, columns_, sums_);
      return;
    }
    terms_[count_++] = term;
    if (count_ == kTerms) flush();
  }

 private:
  static constexpr int kTerms = 8;  // as many as keep A and half the columns of B in L1

  void flush() {
    if (count_ == 0) return;
    int row = 0;
    for (; row + kTileRows <= kBlockTokens; row += kTileRows)
      add_terms<Slots, kTileRows>(terms_, count_, row, pairs_, columns_, sums_);
    add_terms<Slots, kBlockTokens % kTileRows>(terms_, count_, row, pairs_, columns_, sums_);
    count_ = 0;
  }

  int pairs_, columns_, count_ = 0;
  float* sums_;
  KeyTerm terms_[kTerms];
};

}  // namespace nsa::cpu::NSA_ISA
