// A device called "cuda" that does nothing, for the torch CPU wheel.
//
// Autograd asks two questions of a tensor's device even when the tensor is fake: who guards the device (to pick the
// stream a backward node runs on) and do the CUDA hooks say that there is one. The CPU wheel answers neither. Both
// answers are registered here: one device, one stream, every event already complete. No CUDA library is touched.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace vsa_fake_gpu {

constexpr c10::DeviceType kCuda = c10::DeviceType::CUDA;

c10::Device only_device() { return c10::Device(kCuda, 0); }
c10::Stream only_stream() { return c10::Stream(c10::Stream::DEFAULT, only_device()); }

struct NoopGuard final : c10::impl::NoOpDeviceGuardImpl<kCuda> {
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  c10::Device getDevice() const override { return only_device(); }
  c10::Device exchangeDevice(c10::Device) const override { return only_device(); }

  c10::Stream getStream(c10::Device) const noexcept override { return only_stream(); }
  c10::Stream getDefaultStream(c10::Device) const override { return only_stream(); }
  c10::Stream getNewStream(c10::Device, int) const override { return only_stream(); }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return only_stream(); }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}

  // The base class throws on events; an event only has to be non-null to count as recorded.
  void record(void** event, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {
    static char recorded;
    *event = &recorded;
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override {}
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  void synchronizeDevice(const c10::DeviceIndex) const override {}
};

C10_REGISTER_GUARD_IMPL(CUDA, NoopGuard)

}  // namespace vsa_fake_gpu

namespace at {

// ATen looks the hooks up by this class name, in this namespace.
struct CUDAHooks final : CUDAHooksInterface {
  explicit CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  int getNumGPUs() const override { return 1; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex current_device() const override { return 0; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(DeviceIndex) const override {}
  DeviceIndex exchangeDevice(DeviceIndex) const override { return 0; }
  DeviceIndex maybeExchangeDevice(DeviceIndex) const override { return 0; }
};

REGISTER_CUDA_HOOKS(CUDAHooks);

}  // namespace at
