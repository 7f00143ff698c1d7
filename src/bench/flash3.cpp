#include "bench/flash3.h"

#include <ATen/Context.h>
#include <dlfcn.h>
#include <fmt/core.h>

#include <filesystem>
#include <map>
#include <utility>

#include "base/error.h"

namespace nsa::bench {
namespace {

constexpr const char* kNamespaces[] = {"flash_attn_3", "fa3_fwd"};

/// Calls an operator by the names of its arguments; the others keep their defaults. The order and number of arguments
/// differ between versions.
c10::Stack call(const c10::OperatorHandle& op, std::map<std::string, c10::IValue> given) {
  c10::Stack stack;
  for (const auto& argument : op.schema().arguments()) {
    if (const auto found = given.extract(argument.name())) {
      stack.push_back(found.mapped());
    } else {
      stack.push_back(argument.default_value().value_or(c10::IValue()));
    }
  }
  TORCH_CHECK(given.empty(), op.schema().name(), ": has no argument ", given.begin()->first);
  op.callBoxed(stack);
  return stack;
}

}  // namespace

Flash3::Flash3(const std::string& library) {
  // The module needs libtorch.so, which only joins torch's libraries: this program links to these, and finds them by
  // its own search path.
  Dl_info torch;
  if (dladdr(reinterpret_cast<const void*>(&at::globalContext), &torch) != 0)
    dlopen((std::filesystem::path(torch.dli_fname).parent_path() / "libtorch.so").c_str(), RTLD_LAZY | RTLD_GLOBAL);
  // Lazy: the module names functions of Python, which are called only when Python imports it. It stays loaded, as the
  // operators that it registers do.
  if (dlopen(std::filesystem::absolute(library).c_str(), RTLD_LAZY | RTLD_LOCAL) == nullptr)
    throw base::Error(fmt::format("--flash3 {}: cannot be loaded: {}", library, dlerror()));
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const std::string name : kNamespaces) {
    if (!forward_) forward_ = dispatcher.findSchema({name + "::fwd", ""});
    if (!backward_) backward_ = dispatcher.findSchema({name + "::bwd", ""});
  }
  if (!forward_)
    throw base::Error(fmt::format("--flash3 {}: registers no operator flash_attn_3::fwd or fa3_fwd::fwd", library));
}

Flash3::Forward Flash3::forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) const {
  // One split: of long sequences in training or prefill there is nothing to gain from more.
  const auto out = call(*forward_, {{"q", q}, {"k", k}, {"v", v}, {"is_causal", true}, {"num_splits", 1}});
  return {out.at(0).toTensor(), out.at(1).toTensor()};
}

void Flash3::backward(const at::Tensor& d_o, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                      const Forward& forward) const {
  TORCH_CHECK(backward_, forward_->schema().name(), ": the package has no backward");
  call(*backward_, {{"dout", d_o},
                    {"q", q},
                    {"k", k},
                    {"v", v},
                    {"out", forward.o},
                    {"softmax_lse", forward.lse},
                    {"is_causal", true}});
}

}  // namespace nsa::bench
