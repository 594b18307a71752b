// A device of torch's that is none: its memory is host memory at addresses that nobody may touch.
//
// Each byte has two addresses. Tensors know the one that faults, as a pointer to a GPU's memory does; operations work on
// the other one, by copies on the CPU, so that their results have the CPU's bits. Memory begins as NaN.

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <dlfcn.h>
#include <sys/mman.h>
#include <torch/library.h>

#include <atomic>
#include <cstring>
#include <map>
#include <mutex>
#include <unordered_map>
#include <vector>

namespace {

constexpr auto kind = c10::DeviceType::PrivateUse1;
constexpr size_t room = size_t{64} << 30;
constexpr size_t step = 512;

char* reserved(int rights) {
  void* at = mmap(nullptr, room, rights, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  TORCH_CHECK(at != MAP_FAILED, "no address space for the device that poses");
  return static_cast<char*>(at);
}

struct Memory {
  char* shown = reserved(PROT_NONE);
  char* real = reserved(PROT_READ | PROT_WRITE);
  std::mutex lock;
  std::map<size_t, std::vector<size_t>> free;
  std::unordered_map<size_t, size_t> sizes;
  size_t end = 0;
  size_t used = 0;
  size_t peak = 0;
  size_t limit = room;
};

Memory& memory() {
  static Memory* made = new Memory;
  return *made;
}

void release(void* pointer) {
  auto& all = memory();
  std::lock_guard<std::mutex> held(all.lock);
  size_t at = static_cast<char*>(pointer) - all.shown;
  size_t size = all.sizes.at(at);
  all.used -= size;
  all.free[size].push_back(at);
}

struct Allocator final : c10::Allocator {
  c10::DataPtr allocate(size_t asked) override {
    c10::Device device(kind, 0);
    if (asked == 0) {
      return {nullptr, nullptr, &release_nothing, device};
    }
    auto& all = memory();
    size_t size = (asked + step - 1) / step * step;
    size_t at;
    {
      std::lock_guard<std::mutex> held(all.lock);
      // What torch says where a device is out of memory, in a class of its own.
      TORCH_CHECK_WITH(
          OutOfMemoryError, all.used + size <= all.limit, "the device that poses is out of memory: ", asked, " bytes");
      auto& list = all.free[size];
      if (list.empty()) {
        at = all.end;
        all.end += size;
      } else {
        at = list.back();
        list.pop_back();
      }
      all.sizes[at] = size;
      all.used += size;
      all.peak = std::max(all.peak, all.used);
    }
    std::memset(all.real + at, 0xff, size);
    return {all.shown + at, all.shown + at, &release, device};
  }
  static void release_nothing(void*) {}
  c10::DeleterFnPtr raw_deleter() const override {
    return &release;
  }
  void copy_data(void* to, const void* from, size_t count) const override {
    auto& all = memory();
    std::memcpy(all.real + (static_cast<char*>(to) - all.shown), all.real + (static_cast<const char*>(from) - all.shown), count);
  }
};
Allocator allocator;
REGISTER_ALLOCATOR(kind, &allocator);

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override {
    return kind;
  }
  c10::Device exchangeDevice(c10::Device) const override {
    return {kind, 0};
  }
  c10::Device getDevice() const override {
    return {kind, 0};
  }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const override {
    return c10::Stream(c10::Stream::DEFAULT, c10::Device(kind, 0));
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    return getStream(device);
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return getStream(device);
  }
  c10::Stream exchangeStream(c10::Stream) const override {
    return getStream({kind, 0});
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return 1;
  }
  // Whatever was computed is over when the call returns.
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override {
    return true;
  }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  bool queryStream(const c10::Stream&) const override {
    return true;
  }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const c10::DeviceIndex) const override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return true;
  }
  bool hasPrimaryContext(c10::DeviceIndex) const override {
    return true;
  }
  c10::DeviceIndex deviceCount() const override {
    return 1;
  }
  c10::DeviceIndex getCurrentDevice() const override {
    return 0;
  }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override {
    return 0;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override {
    return 0;
  }
};
Hooks hooks;
const bool hooked = (at::RegisterPrivateUse1HooksInterface(&hooks), true);

// --- operations -----------------------------------------------------------------------------------------------------

// The same bytes as a tensor on the CPU, for as long as `tensor` lives.
at::Tensor here(const at::Tensor& tensor) {
  auto& all = memory();
  auto options = at::TensorOptions().dtype(tensor.dtype());
  if (tensor.numel() == 0) {
    return at::empty(tensor.sizes(), options);
  }
  char* shown = static_cast<char*>(tensor.unsafeGetTensorImpl()->mutable_data());
  TORCH_CHECK(shown >= all.shown && shown < all.shown + room, "memory that is not of the device that poses");
  return at::from_blob(all.real + (shown - all.shown), tensor.sizes(), tensor.strides(), options);
}

at::Tensor on_cpu(const at::Tensor& tensor) {
  return tensor.device().type() == kind ? here(tensor) : tensor;
}

at::Tensor empty(
    c10::IntArrayRef size,
    std::optional<c10::ScalarType> dtype,
    std::optional<c10::Layout>,
    std::optional<c10::Device>,
    std::optional<bool>,
    std::optional<c10::MemoryFormat> format) {
  return at::detail::empty_generic(
      size, &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    c10::IntArrayRef size,
    c10::IntArrayRef stride,
    std::optional<c10::ScalarType> dtype,
    std::optional<c10::Layout>,
    std::optional<c10::Device>,
    std::optional<bool>) {
  return at::detail::empty_strided_generic(
      size, stride, &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& target, bool) {
  on_cpu(target).copy_(on_cpu(self));
  return target;
}

const at::Tensor& resized(const at::Tensor& self, c10::IntArrayRef size, std::optional<c10::MemoryFormat> format) {
  auto made = empty(size, c10::typeMetaToScalarType(self.dtype()), {}, {}, {}, format);
  if (self.numel() && self.numel() <= made.numel()) {
    here(made).view(-1).slice(0, 0, self.numel()).copy_(here(self).reshape(-1));
  }
  at::cpu::set_(const_cast<at::Tensor&>(self), made.storage(), 0, made.sizes(), made.strides());
  return self;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& target) {
  if (self.sizes() != target.sizes()) {
    resized(target, self.sizes(), std::nullopt);
  }
  return copy_from(self, target, false);
}

at::Scalar scalar(const at::Tensor& self) {
  return at::_local_scalar_dense(here(self));
}

at::Tensor& set_storage(
    at::Tensor& self, at::Storage source, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  return at::cpu::set_(self, source, offset, size, stride);
}

at::Tensor& set_all(at::Tensor& self, at::Storage source) {
  return at::cpu::set_(self, source, 0, {static_cast<int64_t>(source.nbytes() / self.element_size())}, {});
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return at::cpu::set_(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

bool equal(const at::Tensor& one, const at::Tensor& other) {
  TORCH_CHECK(one.device() == other.device(), "tensors on different devices");
  return at::equal(here(one), here(other));
}

// What torch itself refuses on a GPU; a copy to the CPU would make it pass.
void require_here(const c10::OperatorHandle& op, const torch::jit::Stack* stack) {
  std::optional<c10::Device> found;
  auto look = [&](const at::Tensor& tensor) {
    if (!tensor.defined() || (tensor.dim() == 0 && tensor.device().is_cpu())) {
      return;
    }
    TORCH_CHECK(
        !found || *found == tensor.device(),
        "expected all tensors to be on the same device, but found ", *found, " and ", tensor.device(), " in ",
        op.operator_name());
    found = tensor.device();
  };
  for (const auto& value : torch::jit::last(*stack, op.schema().arguments().size())) {
    if (value.isTensor()) {
      look(value.toTensor());
    } else if (value.isTensorList()) {
      for (const at::Tensor& tensor : value.toTensorVector()) {
        look(tensor);
      }
    }
  }
}

void fall_back(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  // Indices and a generator's numbers may lie on the CPU.
  auto name = op.schema().name();
  if (name.find("index") == std::string::npos && name.find("random") == std::string::npos) {
    require_here(op, stack);
  }
  at::native::cpu_fallback(op, stack, true);
}

// --- what the tests ask ---------------------------------------------------------------------------------------------

// What Python's own code calls; this library is compiled without its headers.
template <class Function>
Function pythons(const char* name) {
  return reinterpret_cast<Function>(dlsym(RTLD_DEFAULT, name));
}

// A tensor with a storage of its own on bytes of the device, which takes over a reference to a Python object: as torch
// does it for __cuda_array_interface__.
at::Tensor lent(int64_t address, int64_t nbytes, int64_t owner) {
  auto let_go = [owner](void*) {
    int held = pythons<int (*)()>("PyGILState_Ensure")();
    pythons<void (*)(void*)>("Py_DecRef")(reinterpret_cast<void*>(owner));
    pythons<void (*)(int)>("PyGILState_Release")(held);
  };
  return at::for_blob(reinterpret_cast<void*>(address), {nbytes})
      .options(at::TensorOptions().dtype(at::kByte).device(c10::Device(kind, 0)))
      .target_device(c10::Device(kind, 0))
      .deleter(let_go)
      .make_tensor();
}

int64_t used(bool peak) {
  return static_cast<int64_t>(peak ? memory().peak : memory().used);
}

void limit(int64_t nbytes) {
  memory().limit = nbytes < 0 ? room : static_cast<size_t>(nbytes);
  memory().peak = memory().used;
}

} // namespace

TORCH_LIBRARY(posing, library) {
  library.def("lent(int address, int nbytes, int owner) -> Tensor", &lent);
  library.def("used(bool peak) -> int", &used);
  library.def("limit(int nbytes) -> ()", &limit);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("_copy_from", &copy_from);
  library.impl("_copy_from_and_resize", &copy_from_and_resize);
  library.impl("resize_", &resized);
  library.impl("_local_scalar_dense", &scalar);
  library.impl("equal", &equal);
  library.impl("set_.source_Storage_storage_offset", &set_storage);
  library.impl("set_.source_Storage", &set_all);
  library.impl("set_.source_Tensor", &set_tensor);
  library.impl("as_strided", [](const at::Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride,
                                std::optional<int64_t> offset) {
    return at::native::as_strided_tensorimpl(self, size, stride, offset);
  });
  library.impl("view", [](const at::Tensor& self, c10::IntArrayRef size) { return at::native::view(self, size); });
  library.impl("_reshape_alias", [](const at::Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride) {
    return at::native::_reshape_alias(self, size, stride);
  });
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&fall_back>());
}
