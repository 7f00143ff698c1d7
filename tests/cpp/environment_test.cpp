// NSA_LOG, NSA_DUMP, NSA_BACKEND, NSA_CPU_ISA, NSA_CUDA_KERNELS, NSA_CUDA_DS_MIB and NSA_BATCH_INVARIANT.
#include <gtest/gtest.h>

#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>

#include "core/backend.h"
#include "cpu/isa.h"
#include "support/environment.h"
#include "support/tensor.h"

namespace nsa::test {
namespace {

struct Example {
  Tensor k{DType::kFloat32, {1, 40, 1, 16}, Layout::kHeadsFirst}, out{DType::kFloat32, {1, 1, 1, 16}};
  CompressParams params;

  Example() {
    fill_normal(k, 1);
    params.k = k, params.out = out;
    params.weights.kind = CompressionKind::kMean;
  }
};

TEST(Log, OneLinePerCall) {
  Example example;
  const Environment log("NSA_LOG", "1");
  testing::internal::CaptureStderr();
  ASSERT_TRUE(compress(example.params, {Backend::kReference}).ok());
  ASSERT_TRUE(compress(example.params).ok());
  EXPECT_EQ(testing::internal::GetCapturedStderr(),
            std::string("nsa: compress backend=reference variant=float64 batched k=float32 (1, 40, 1, 16)\n") +
                "nsa: compress backend=cpu variant=" + cpu::variant() + " batched k=float32 (1, 40, 1, 16)\n");
}

TEST(Log, NothingUnlessAskedFor) {
  Example example;
  const Environment log("NSA_LOG", "0");
  testing::internal::CaptureStderr();
  ASSERT_TRUE(compress(example.params).ok());
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "");
}

TEST(Backends, TheEnvironmentChoosesUnlessTheCallDoes) {
  Backend chosen;
  {
    const Environment backend("NSA_BACKEND", "reference");
    ASSERT_TRUE(choose_backend({}, {}, chosen).ok());
    EXPECT_EQ(chosen, Backend::kReference);
    ASSERT_TRUE(choose_backend({}, {Backend::kCPU}, chosen).ok());
    EXPECT_EQ(chosen, Backend::kCPU);
    EXPECT_NE(describe_backends().find("chosen: reference, NSA_BACKEND = reference"), std::string::npos);
  }
  const Environment backend("NSA_BACKEND", "gpu");
  EXPECT_EQ(choose_backend({}, {}, chosen).message(), "NSA_BACKEND = 'gpu': must be auto, cpu, cuda or reference");
  EXPECT_EQ(compress(Example().params).message(),
            "compress: NSA_BACKEND = 'gpu': must be auto, cpu, cuda or reference");
}

TEST(InstructionSets, AutoTakesTheFastestOfTheVendor) {
  using cpu::Isa;
  const auto all = [](Isa) { return true; };
  const auto without_bf16 = [](Isa isa) { return isa != Isa::avx512bf16; };
  const auto bf16_alone = [](Isa isa) { return isa == Isa::avx512bf16 || isa == Isa::portable; };
  const auto old = [](Isa isa) { return isa == Isa::avx2 || isa == Isa::portable; };
  const auto arm = [](Isa isa) { return isa == Isa::neonbf16 || isa == Isa::neon || isa == Isa::portable; };
  EXPECT_EQ(cpu::fastest_isa("GenuineIntel", all), Isa::avx512);
  EXPECT_EQ(cpu::fastest_isa("GenuineIntel", bf16_alone), Isa::avx512bf16);
  for (const char* vendor : {"AuthenticAMD", "HygonGenuine", ""}) {
    EXPECT_EQ(cpu::fastest_isa(vendor, all), Isa::avx512bf16) << vendor;
  }
  for (const char* vendor : {"GenuineIntel", "AuthenticAMD", ""}) {
    EXPECT_EQ(cpu::fastest_isa(vendor, without_bf16), Isa::avx512) << vendor;
    EXPECT_EQ(cpu::fastest_isa(vendor, old), Isa::avx2) << vendor;
    EXPECT_EQ(cpu::fastest_isa(vendor, arm), Isa::neonbf16) << vendor;
  }
}

TEST(InstructionSets, TheDescriptionSaysWhichSetRunsAndWhy) {
  {
    const Environment isa("NSA_CPU_ISA", "auto");
    EXPECT_NE(
        describe_instruction_sets().find(std::string("chosen: ") + cpu::variant() + ", the fastest on this processor"),
        std::string::npos);
  }
  const Environment isa("NSA_CPU_ISA", "portable");
  EXPECT_NE(describe_instruction_sets().find("chosen: portable, NSA_CPU_ISA = portable"), std::string::npos);
}

TEST(Backends, KernelsThatThereAreNotAreAnError) {
  const Environment kernels("NSA_CUDA_KERNELS", "fast");
  const Problem problem{.device = {DeviceType::kCUDA, 0}};
  EXPECT_EQ(supports(Backend::kCUDA, problem).message(), "NSA_CUDA_KERNELS = 'fast': must be auto or portable");
}

TEST(Backends, BatchInvariantIsOneOrNought) {
  const Problem problem{.device = {DeviceType::kCUDA, 0}};
  for (const char* value : {"yes", "2", " 1"}) {
    const Environment invariant("NSA_BATCH_INVARIANT", value);
    EXPECT_EQ(supports(Backend::kCUDA, problem).message(),
              "NSA_BATCH_INVARIANT = '" + std::string(value) + "': must be 0 or 1");
  }
  for (const char* value : {"", "0", "1"}) {
    const Environment invariant("NSA_BATCH_INVARIANT", value);
    EXPECT_EQ(supports(Backend::kCUDA, problem).message().find("NSA_BATCH_INVARIANT"), std::string::npos) << value;
  }
}

TEST(Backends, MemoryThatIsNoNumberIsAnError) {
  const Problem problem{.device = {DeviceType::kCUDA, 0}};
  for (const char* value : {"1G", "-1", "1048577", " "}) {
    const Environment memory("NSA_CUDA_DS_MIB", value);
    EXPECT_EQ(supports(Backend::kCUDA, problem).message(),
              "NSA_CUDA_DS_MIB = '" + std::string(value) + "': must be a number from 0 to 1048576");
  }
  const Environment memory("NSA_CUDA_DS_MIB", "512");
  EXPECT_EQ(supports(Backend::kCUDA, problem).message().find("NSA_CUDA_DS_MIB"), std::string::npos);
}

TEST(Dump, InputsAsSafetensors) {
  Example example;
  const auto folder = std::filesystem::path(testing::TempDir()) / ("nsa_dump_" + std::to_string(getpid()));
  std::filesystem::create_directory(folder);
  {
    const Environment dump("NSA_DUMP", folder.string());
    ASSERT_TRUE(compress(example.params).ok());
  }
  std::string content;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    EXPECT_TRUE(entry.path().string().ends_with("-compress.safetensors")) << entry.path();
    std::ifstream file(entry.path(), std::ios::binary);
    content.assign(std::istreambuf_iterator<char>(file), {});
  }
  std::filesystem::remove_all(folder);
  std::uint64_t length = 0;
  ASSERT_GE(content.size(), 8u);
  std::memcpy(&length, content.data(), 8);
  const std::string header = content.substr(8, length), data = content.substr(8 + length);
  EXPECT_EQ(header.substr(0, header.find_last_of('}') + 1),
            R"({"__metadata__":{"operation":"compress","layout":"batched","kernel_size":"32","kernel_stride":"16",)"
            R"("block_size":"64","topk":"16","init_blocks":"1","local_blocks":"2","window_size":"512",)"
            R"("weights.kind":"mean"},"k":{"dtype":"F32","shape":[1,40,1,16],"data_offsets":[0,2560]}})");
  Tensor k(DType::kFloat32, {1, 40, 1, 16});
  ASSERT_EQ(data.size(), 2560u);
  std::memcpy(k.view().data, data.data(), data.size());
  EXPECT_TRUE(same_bits(k, example.k));
}

TEST(Dump, NeverOverANameThatIsThere) {
  // What a process of this id may have left: files and links of the numbers to come.
  const auto folder = std::filesystem::path(testing::TempDir()) / ("nsa_dump_names_" + std::to_string(getpid()));
  std::filesystem::create_directory(folder);
  const auto name = [&](int number) {
    char text[64];
    std::snprintf(text, sizeof text, "%ld-%06d-compress.safetensors", static_cast<long>(getpid()), number);
    return folder / text;
  };
  for (int i = 0; i < 100; ++i) {
    if (i % 2)
      std::filesystem::create_symlink(folder / "target", name(i));
    else
      std::ofstream(name(i)) << "mine";
  }
  {
    const Environment dump("NSA_DUMP", folder.string());
    ASSERT_TRUE(compress(Example().params).ok());
  }
  EXPECT_FALSE(std::filesystem::exists(folder / "target"));
  int links = 0, files = 0, dumps = 0;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    if (entry.is_symlink())
      ++links;
    else
      ++(entry.file_size() == 4 ? files : dumps);
  }
  EXPECT_EQ(links, 50);
  EXPECT_EQ(files, 50);
  EXPECT_EQ(dumps, 1);
  std::filesystem::remove_all(folder);
}

TEST(Dump, AFolderThatIsNotThereIsAnError) {
  const Environment dump("NSA_DUMP", "/nonexistent");
  const Status status = compress(Example().params);
  EXPECT_EQ(status.code(), StatusCode::kInternal);
  EXPECT_EQ(status.message().rfind("compress: NSA_DUMP: could not write /nonexistent/", 0), 0u) << status.message();
}

}  // namespace
}  // namespace nsa::test
