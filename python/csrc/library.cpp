// Schemas and kernels of the operations torch.ops.nsa.*, alike for tensors in host memory and on a GPU. Fake kernels
// and autograd formulas are Python's (python/nsa/_registration.py).
#include <string>

#include "box.h"
#include "operations.h"

namespace nsa::python {
namespace {

const std::string kPacked = PackedArguments::kSchema;
const std::string kWeights = PhiArguments::schema();
const std::string kBranches = BranchArguments::kSchemaCompressed;
const std::string kSaved = SavedArguments::kSchema;
const std::string kRotation = RotationArguments::kSchema;
const std::string kLayer =
    std::string(BranchArguments::kSchema) + ", " + PhiArguments::schema("_k") + ", " + PhiArguments::schema("_v");

std::string tensors(int count) {
  std::string text = "(Tensor";
  for (int i = 1; i < count; ++i) text += ", Tensor";
  return text + ")";
}

void define(Library& m) {
  const auto def = [&m](const std::string& schema) { m.def(schema.c_str()); };
  def("compress(Tensor k, " + kWeights + ", int[] cfg, Tensor? cu_seqlens) -> Tensor");
  def("compress_backward(Tensor d_out, Tensor k, " + kWeights + ", int[] cfg, Tensor? cu_seqlens, bool[] needs) -> " +
      tensors(6));
  def("compressed_cu_seqlens(Tensor cu_seqlens, int[] cfg) -> Tensor");
  def("compressed_attention(Tensor q, Tensor k_c, Tensor v_c, int[] cfg, float? softmax_scale, SymInt? seqlen_k, " +
      kPacked + ") -> " + tensors(2));
  def("compressed_attention_backward(Tensor d_o, Tensor q, Tensor k_c, Tensor v_c, Tensor o, Tensor lse, int[] cfg, "
      "float? softmax_scale, SymInt? seqlen_k, " +
      kPacked + ", bool[] needs) -> " + tensors(3));
  def("select_blocks(Tensor q, Tensor k_c, Tensor lse, int[] cfg, float? softmax_scale, SymInt? seqlen_k, "
      "float noise, SymInt seed, " +
      kPacked + ") -> Tensor");
  def("selected_attention(Tensor q, Tensor k, Tensor v, Tensor indices, int block_size, float? softmax_scale, " +
      kPacked + ") -> " + tensors(2));
  def("selected_attention_backward(Tensor d_o, Tensor q, Tensor k, Tensor v, Tensor indices, Tensor o, Tensor lse, "
      "int block_size, float? softmax_scale, " +
      kPacked + ", bool[] needs) -> " + tensors(3));
  def("sliding_window_attention(Tensor q, Tensor k, Tensor v, int window_size, float? softmax_scale, " + kPacked +
      ") -> " + tensors(2));
  def("sliding_window_attention_backward(Tensor d_o, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, "
      "int window_size, float? softmax_scale, " +
      kPacked + ", bool[] needs) -> " + tensors(3));
  def("combine(Tensor o_cmp, Tensor o_slc, Tensor o_swa, Tensor gates) -> Tensor");
  def("combine_backward(Tensor d_o, Tensor o_cmp, Tensor o_slc, Tensor o_swa, Tensor gates, bool[] needs) -> " +
      tensors(4));
  def("nsa_attention(" + kBranches + ", int[] cfg, float? softmax_scale, float noise, SymInt seed, " + kPacked +
      ", Tensor? block_indices, bool keep, bool return_indices) -> " + tensors(8));
  def("nsa_attention_backward(Tensor d_o, " + kBranches + ", Tensor indices, " + kSaved +
      ", int[] cfg, float? softmax_scale, " + kPacked + ", Tensor? block_indices, bool[] needs) -> " + tensors(8));
  def("native_sparse_attention(" + kLayer + ", int[] cfg, float? softmax_scale, " + kRotation +
      ", float noise, SymInt seed, " + kPacked +
      ", Tensor? block_indices, bool keep, bool keep_compressed, bool return_indices) -> " + tensors(10));
  def("native_sparse_attention_backward(Tensor d_o, " + kLayer + ", Tensor indices, Tensor k_c, Tensor v_c, " + kSaved +
      ", int[] cfg, float? softmax_scale, " + kRotation + ", " + kPacked +
      ", Tensor? block_indices, bool[] needs) -> " + tensors(18));
  def("describe_backends() -> str");
  def("describe_devices() -> str");
  def("describe_instruction_sets() -> str");
  def("device_count() -> int");
  def("version() -> str");
}

void implement(Library& m) {
  m.impl("compress", box<&compress>);
  m.impl("compress_backward", box<&compress_backward>);
  m.impl("compressed_attention", box<&compressed_attention>);
  m.impl("compressed_attention_backward", box<&compressed_attention_backward>);
  m.impl("select_blocks", box<&select_blocks>);
  m.impl("selected_attention", box<&selected_attention>);
  m.impl("selected_attention_backward", box<&selected_attention_backward>);
  m.impl("sliding_window_attention", box<&sliding_window_attention>);
  m.impl("sliding_window_attention_backward", box<&sliding_window_attention_backward>);
  m.impl("combine", box<&combine>);
  m.impl("combine_backward", box<&combine_backward>);
  m.impl("nsa_attention", box<&nsa_attention>);
  m.impl("nsa_attention_backward", box<&nsa_attention_backward>);
  m.impl("native_sparse_attention", box<&native_sparse_attention>);
  m.impl("native_sparse_attention_backward", box<&native_sparse_attention_backward>);
  implement_decode(m);
}

std::int64_t device_count() { return nsa::device_count(); }
std::string version() { return nsa::version(); }

}  // namespace
}  // namespace nsa::python

// NSA_TORCH_NAMESPACE is a CMake option. Torch's macros paste their arguments, so it has to be expanded before them.
#define NSA_LIBRARY(name, m) STABLE_TORCH_LIBRARY(name, m)
#define NSA_LIBRARY_IMPL(name, key, m) STABLE_TORCH_LIBRARY_IMPL(name, key, m)

/// How Python finds the operators.
extern "C" [[gnu::visibility("default")]] const char* const nsa_torch_namespace = C10_STRINGIZE(NSA_TORCH_NAMESPACE);

NSA_LIBRARY(NSA_TORCH_NAMESPACE, m) {
  nsa::python::define(m);
  nsa::python::define_decode(m);
}
NSA_LIBRARY_IMPL(NSA_TORCH_NAMESPACE, CPU, m) {
  nsa::python::implement(m);
  m.impl("compressed_cu_seqlens", nsa::python::box<&nsa::python::compressed_cu_seqlens>);  // on a GPU: _registration.py
}
NSA_LIBRARY_IMPL(NSA_TORCH_NAMESPACE, CUDA, m) { nsa::python::implement(m); }
NSA_LIBRARY_IMPL(NSA_TORCH_NAMESPACE, CompositeExplicitAutograd, m) {  // no tensors
  m.impl("describe_backends", nsa::python::box<&nsa::describe_backends>);
  m.impl("describe_devices", nsa::python::box<&nsa::describe_devices>);
  m.impl("describe_instruction_sets", nsa::python::box<&nsa::describe_instruction_sets>);
  m.impl("device_count", nsa::python::box<&nsa::python::device_count>);
  m.impl("version", nsa::python::box<&nsa::python::version>);
}
