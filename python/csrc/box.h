// torch calls a kernel with a stack of values; here it becomes a call of a function. As TORCH_BOX, and a parameter may
// be a group of arguments besides (arguments.h).
#pragma once

#include <torch/csrc/stable/library.h>

#include <tuple>
#include <type_traits>
#include <utility>

namespace nsa::python {

template <class T>
concept ArgumentGroup = requires {
  typename T::Members;
};

template <class T>
constexpr std::size_t arguments_in = 1;
template <ArgumentGroup T>
constexpr std::size_t arguments_in<T> = std::tuple_size_v<typename T::Members>;

/// Takes a T off the stack, where its members are, and moves on behind it.
template <class T>
T take(StableIValue*& next) {
  if constexpr (ArgumentGroup<T>) {
    return [&]<std::size_t... i>(std::index_sequence<i...>) {
      return T{take<std::tuple_element_t<i, typename T::Members>>(next)...};  // in braces: from left to right
    }
    (std::make_index_sequence<arguments_in<T>>());
  } else {
    return torch::stable::detail::to<T>(*next++);
  }
}

template <class T>
void put(StableIValue* stack, const T& result) {
  *stack = torch::stable::detail::from(result);
}
template <class... T>
void put(StableIValue* stack, const std::tuple<T...>& results) {
  std::apply([&](const T&... result) { ((*stack++ = torch::stable::detail::from(result)), ...); }, results);
}

template <class Result>
constexpr std::size_t results_in = 1;
template <>
inline constexpr std::size_t results_in<void> = 0;
template <class... T>
constexpr std::size_t results_in<std::tuple<T...>> = sizeof...(T);

template <auto kernel>
struct Boxed;
template <class Result, class... Parameters, Result (*kernel)(Parameters...)>
struct Boxed<kernel> {
  static void call(StableIValue* stack, std::uint64_t arguments, std::uint64_t results) {
    constexpr std::size_t expected = (std::size_t{0} + ... + arguments_in<std::remove_cvref_t<Parameters>>);
    STD_TORCH_CHECK(arguments == expected && results == results_in<Result>, "a schema of ", arguments,
                    " arguments and ", results, " results for a kernel of ", expected, " and ", results_in<Result>);
    [[maybe_unused]] StableIValue* next = stack;
    std::tuple<std::remove_cvref_t<Parameters>...> taken{take<std::remove_cvref_t<Parameters>>(next)...};
    if constexpr (std::is_void_v<Result>) {
      std::apply(kernel, taken);
    } else {
      put(stack, std::apply(kernel, taken));
    }
  }
};

/// For Library::impl.
template <auto kernel>
constexpr auto box = &Boxed<kernel>::call;

}  // namespace nsa::python
