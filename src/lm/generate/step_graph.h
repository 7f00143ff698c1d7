// Work on a GPU that is the same every time, launched as one CUDA graph.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/StreamGuard.h>

#include <functional>
#include <memory>

namespace nsa::lm {

/// While it lives, torch and libnsa work on a stream that is not the default one, from which nothing can be captured.
/// What was put into the stream before comes first, and the host waits for all when it ends. On a CPU: nothing.
class OwnStream {
 public:
  explicit OwnStream(at::Device device);
  ~OwnStream();
  OwnStream(const OwnStream&) = delete;
  OwnStream& operator=(const OwnStream&) = delete;

 private:
  c10::OptionalStreamGuard guard_;
};

class StepGraph {
 public:
  /// Whether this build has graphs for the device.
  static bool possible(at::Device device);

  /// Captures what `work` puts into the device's current stream, an OwnStream that has run the same before. Nothing of
  /// it runs now. Tensors that it makes lie in memory of the graph's own, until the next replay.
  StepGraph(at::Device device, const std::function<void()>& work);
  ~StepGraph();
  StepGraph(const StepGraph&) = delete;
  StepGraph& operator=(const StepGraph&) = delete;

  /// Into the current stream.
  void replay();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace nsa::lm
