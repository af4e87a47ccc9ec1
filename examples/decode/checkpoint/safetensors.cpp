// SPDX-License-Identifier: Apache-2.0
// Header parsing and mapping of safetensors files.
#include "checkpoint/safetensors.hpp"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <limits>
#include <utility>

#include <fcntl.h>
#include <nlohmann/json.hpp>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <helix/error.hpp>

#include "checkpoint/strict_json.hpp"

namespace helix::decode {
namespace {

constexpr std::uint64_t kMaxHeaderBytes = 100'000'000;  // the format's own limit
constexpr std::uint64_t kLengthBytes = 8;
constexpr std::size_t kMaxRank = 16;

struct TypeEntry {
  std::string_view name;
  unsigned bits;
  std::optional<DType> dtype;
};

constexpr std::array kTypes = {
    TypeEntry{"BF16", 16, DType::bf16},    TypeEntry{"F16", 16, DType::f16},
    TypeEntry{"F32", 32, DType::f32},      TypeEntry{"F8_E4M3", 8, DType::fp8_e4m3},
    TypeEntry{"F64", 64, std::nullopt},    TypeEntry{"F8_E5M2", 8, std::nullopt},
    TypeEntry{"F8_E8M0", 8, std::nullopt}, TypeEntry{"F8_E4M3FNUZ", 8, std::nullopt},
    TypeEntry{"F6_E2M3", 6, std::nullopt}, TypeEntry{"F8_E5M2FNUZ", 8, std::nullopt},
    TypeEntry{"F6_E3M2", 6, std::nullopt}, TypeEntry{"F4", 4, std::nullopt},
    TypeEntry{"BOOL", 8, std::nullopt},    TypeEntry{"U8", 8, std::nullopt},
    TypeEntry{"I8", 8, std::nullopt},      TypeEntry{"U16", 16, std::nullopt},
    TypeEntry{"I16", 16, std::nullopt},    TypeEntry{"U32", 32, std::nullopt},
    TypeEntry{"I32", 32, std::nullopt},    TypeEntry{"U64", 64, std::nullopt},
    TypeEntry{"I64", 64, std::nullopt},    TypeEntry{"C64", 64, std::nullopt},
};

const TypeEntry* find_type(std::string_view name) {
  const auto found =
      std::find_if(kTypes.begin(), kTypes.end(), [&](const TypeEntry& t) { return t.name == name; });
  return found == kTypes.end() ? nullptr : &*found;
}

std::string type_names() {
  std::string names;
  for (const TypeEntry& type : kTypes) names.append(names.empty() ? "" : ", ").append(type.name);
  return names;
}

/// Takes the header's JSON event by event and stops at the first that the format does not allow, so that a
/// hostile header costs no more memory than its own bytes and cannot nest.
class HeaderReader {
 public:
  explicit HeaderReader(std::string_view file) : file_(file) {}

  std::vector<TensorInfo> take_tensors() { return std::move(tensors_); }

  bool null() { return unexpected("null"); }
  bool boolean(bool) { return unexpected("a boolean"); }
  bool number_integer(std::int64_t value) { return unexpected("the negative number ", value); }
  bool number_float(double, const std::string& text) { return unexpected("the number ", text); }
  bool binary(nlohmann::json::binary_t&) { return unexpected("binary data"); }

  bool number_unsigned(std::uint64_t value) {
    if (state_ == State::shape) {
      if (tensor_.shape.size() == kMaxRank) fail("shape has more than ", kMaxRank, " dimensions");
      if (value > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max())) {
        fail("shape holds ", value, ", which no tensor has");
      }
      tensor_.shape.push_back(static_cast<std::int64_t>(value));
      return true;
    }
    if (state_ == State::offsets) {
      if (num_offsets_ == 2) fail("data_offsets holds more than 2 numbers");
      (num_offsets_++ == 0 ? tensor_.begin : tensor_.end) = value;
      return true;
    }
    return unexpected("the number ", value);
  }

  bool string(std::string& value) {
    if (state_ == State::metadata_value) {
      state_ = State::metadata;
      return true;
    }
    if (state_ == State::dtype_value) {
      const TypeEntry* type = find_type(value);
      if (type == nullptr) fail("dtype is ", printable(value), "; expected one of ", type_names());
      tensor_.dtype_name = type->name;
      tensor_.dtype = type->dtype;
      state_ = State::tensor;
      return true;
    }
    return unexpected("the string ", printable(value));
  }

  bool start_object(std::size_t) {
    switch (state_) {
      case State::start:
        state_ = State::top;
        return true;
      case State::tensor_value:
        state_ = State::tensor;
        return true;
      case State::metadata_start:
        state_ = State::metadata;
        return true;
      default:
        return unexpected("an object");
    }
  }

  bool key(std::string& key) {
    switch (state_) {
      case State::top:
        if (key == "__metadata__") {
          if (std::exchange(has_metadata_, true)) fail("__metadata__ appears twice");
          state_ = State::metadata_start;
        } else {
          tensor_ = {};
          tensor_.name = key;
          has_dtype_ = has_shape_ = has_offsets_ = false;
          state_ = State::tensor_value;
        }
        return true;
      case State::metadata:
        state_ = State::metadata_value;
        return true;
      case State::tensor:
        if (key == "dtype") return enter(State::dtype_value, has_dtype_, key);
        if (key == "shape") return enter(State::shape_value, has_shape_, key);
        if (key == "data_offsets") return enter(State::offsets_value, has_offsets_, key);
        fail("unknown key ", printable(key), "; expected dtype, shape and data_offsets");
      default:
        return unexpected("a key");
    }
  }

  bool end_object() {
    switch (state_) {
      case State::top:
        state_ = State::done;
        return true;
      case State::metadata:
        state_ = State::top;
        return true;
      case State::tensor:
        if (!has_dtype_) fail("dtype is missing");
        if (!has_shape_) fail("shape is missing");
        if (!has_offsets_) fail("data_offsets is missing");
        tensors_.push_back(std::move(tensor_));
        tensor_ = {};
        state_ = State::top;
        return true;
      default:
        return unexpected("the end of an object");
    }
  }

  bool start_array(std::size_t) {
    switch (state_) {
      case State::shape_value:
        state_ = State::shape;
        return true;
      case State::offsets_value:
        state_ = State::offsets;
        num_offsets_ = 0;
        return true;
      default:
        return unexpected("an array");
    }
  }

  bool end_array() {
    if (state_ == State::offsets && num_offsets_ != 2) {
      fail("data_offsets holds ", num_offsets_, " numbers; expected 2");
    }
    state_ = State::tensor;
    return true;
  }

  bool parse_error(std::size_t position, const std::string&, const nlohmann::json::exception& error) {
    throw Error(ErrorCode::invalid_file, file_, ": header is not valid JSON at byte ", position, ": ",
                printable(error.what()));
  }

 private:
  enum class State {
    start,
    top,
    tensor_value,
    tensor,
    dtype_value,
    shape_value,
    shape,
    offsets_value,
    offsets,
    metadata_start,
    metadata,
    metadata_value,
    done
  };

  bool enter(State next, bool& seen, const std::string& key) {
    if (std::exchange(seen, true)) fail(key, " appears twice");
    state_ = next;
    return true;
  }

  template <class... Parts>
  bool unexpected(const Parts&... parts) {
    fail("unexpected ", parts...);
    return false;
  }

  template <class... Parts>
  [[noreturn]] void fail(const Parts&... parts) {
    if (state_ == State::start || state_ == State::top) {
      throw Error(ErrorCode::invalid_file, file_, ": header: ", parts...);
    }
    if (state_ == State::metadata_start || state_ == State::metadata || state_ == State::metadata_value) {
      throw Error(ErrorCode::invalid_file, file_, ": header: __metadata__: ", parts..., "; expected strings");
    }
    throw Error(ErrorCode::invalid_file, file_, ": tensor ", printable(tensor_.name), ": ", parts...);
  }

  std::string_view file_;
  State state_ = State::start;
  TensorInfo tensor_;
  bool has_dtype_ = false;
  bool has_shape_ = false;
  bool has_offsets_ = false;
  bool has_metadata_ = false;
  int num_offsets_ = 0;
  std::vector<TensorInfo> tensors_;
};

/// Type, shape and offsets of one tensor agree, and it lies inside the data.
void check_extent(const TensorInfo& tensor, std::uint64_t data_bytes, std::string_view file) {
  const auto fail = [&](const auto&... parts) {
    throw Error(ErrorCode::invalid_file, file, ": tensor ", printable(tensor.name), ": ", parts...);
  };
  if (tensor.begin > tensor.end) fail("data_offsets [", tensor.begin, ", ", tensor.end, "] run backwards");
  if (tensor.end > data_bytes) {
    fail("data_offsets [", tensor.begin, ", ", tensor.end, "] leave the ", data_bytes,
         " bytes of data: the file is truncated or its header is wrong");
  }
  std::uint64_t bits = find_type(tensor.dtype_name)->bits;
  for (const std::int64_t extent : tensor.shape) {
    if (__builtin_mul_overflow(bits, static_cast<std::uint64_t>(extent), &bits)) {
      fail("shape ", shape_string(tensor.shape), " of ", tensor.dtype_name, " overflows 64 bits");
    }
  }
  if (bits % 8 != 0)
    fail("shape ", shape_string(tensor.shape), " of ", tensor.dtype_name, " ends inside a byte");
  if (bits / 8 != tensor.end - tensor.begin) {
    fail("shape ", shape_string(tensor.shape), " of ", tensor.dtype_name, " takes ", bits / 8,
         " bytes, but data_offsets [", tensor.begin, ", ", tensor.end, "] hold ", tensor.end - tensor.begin);
  }
}

/// Every byte of the data belongs to exactly one tensor.
void check_coverage(const std::vector<TensorInfo>& tensors, std::uint64_t data_bytes, std::string_view file) {
  std::vector<const TensorInfo*> order;
  order.reserve(tensors.size());
  for (const TensorInfo& tensor : tensors) order.push_back(&tensor);
  std::sort(order.begin(), order.end(), [](const TensorInfo* a, const TensorInfo* b) {
    return std::pair(a->begin, a->end) < std::pair(b->begin, b->end);
  });
  std::uint64_t covered = 0;
  for (const TensorInfo* tensor : order) {
    HELIX_EXPECTS(tensor->begin >= covered, ErrorCode::invalid_file, file, ": tensor ",
                  printable(tensor->name), ": data_offsets [", tensor->begin, ", ", tensor->end,
                  "] overlap another tensor that ends at ", covered);
    HELIX_EXPECTS(tensor->begin == covered, ErrorCode::invalid_file, file, ": tensor ",
                  printable(tensor->name), ": data_offsets [", tensor->begin, ", ", tensor->end,
                  "] leave a hole: no tensor has bytes [", covered, ", ", tensor->begin, ")");
    covered = tensor->end;
  }
  HELIX_EXPECTS(covered == data_bytes, ErrorCode::invalid_file, file, ": tensors end at byte ", covered,
                " of the data, which has ", data_bytes);
}

[[noreturn]] void throw_io(const std::string& path, const char* what) {
  throw Error(ErrorCode::io, path, ": ", what, ": ", std::strerror(errno));
}

}  // namespace

std::int64_t TensorInfo::rows() const {
  std::int64_t rows = 1;
  for (std::size_t d = 0; d + 1 < shape.size(); ++d) rows *= shape[d];
  return rows;
}

std::int64_t TensorInfo::cols() const {
  return shape.empty() ? 1 : shape.back();
}

std::string shape_string(std::span<const std::int64_t> shape) {
  std::string text = "[";
  for (const std::int64_t extent : shape)
    text.append(text.size() > 1 ? ", " : "").append(std::to_string(extent));
  return text + "]";
}

SafetensorsHeader parse_safetensors_header(std::span<const std::byte> bytes, std::uint64_t file_size,
                                           std::string_view file) {
  HELIX_EXPECTS(file_size >= kLengthBytes && bytes.size() >= kLengthBytes, ErrorCode::invalid_file, file,
                ": has ", file_size, " bytes; a safetensors file starts with an 8-byte header size");
  std::uint64_t header_bytes = 0;
  for (unsigned i = 0; i < kLengthBytes; ++i) header_bytes |= static_cast<std::uint64_t>(bytes[i]) << (8 * i);
  HELIX_EXPECTS(header_bytes <= kMaxHeaderBytes, ErrorCode::invalid_file, file, ": header size is ",
                header_bytes, "; the format allows at most ", kMaxHeaderBytes);
  const std::uint64_t available = std::min<std::uint64_t>(file_size, bytes.size()) - kLengthBytes;
  HELIX_EXPECTS(header_bytes <= available, ErrorCode::invalid_file, file, ": header size is ", header_bytes,
                ", but only ", available, " bytes follow: the file is truncated");
  const std::string_view text(reinterpret_cast<const char*>(bytes.data()) + kLengthBytes,
                              static_cast<std::size_t>(header_bytes));
  HELIX_EXPECTS(text.starts_with('{'), ErrorCode::invalid_file, file, ": header does not start with '{'");

  HeaderReader reader(file);
  nlohmann::json::sax_parse(text.begin(), text.end(), &reader);

  SafetensorsHeader header;
  header.tensors = reader.take_tensors();
  header.data_offset = kLengthBytes + header_bytes;
  std::sort(header.tensors.begin(), header.tensors.end(),
            [](const TensorInfo& a, const TensorInfo& b) { return a.name < b.name; });
  const auto twin =
      std::adjacent_find(header.tensors.begin(), header.tensors.end(),
                         [](const TensorInfo& a, const TensorInfo& b) { return a.name == b.name; });
  HELIX_EXPECTS(twin == header.tensors.end(), ErrorCode::invalid_file, file, ": tensor ",
                printable(twin->name), " appears twice");
  const std::uint64_t data_bytes = file_size - header.data_offset;
  for (const TensorInfo& tensor : header.tensors) check_extent(tensor, data_bytes, file);
  check_coverage(header.tensors, data_bytes, file);
  return header;
}

SafetensorsFile::SafetensorsFile(std::string path) : path_(std::move(path)) {
  const int descriptor = ::open(path_.c_str(), O_RDONLY | O_CLOEXEC);
  if (descriptor < 0) throw_io(path_, "cannot open");
  struct stat status = {};
  if (::fstat(descriptor, &status) != 0 || !S_ISREG(status.st_mode)) {
    ::close(descriptor);
    throw Error(ErrorCode::io, path_, ": not a regular file");
  }
  const auto size = static_cast<std::size_t>(status.st_size);
  if (size > 0) {
    void* address = ::mmap(nullptr, size, PROT_READ, MAP_PRIVATE, descriptor, 0);
    if (address == MAP_FAILED) {
      const int failure = errno;
      ::close(descriptor);
      errno = failure;
      throw_io(path_, "cannot map");
    }
    mapping_ = {static_cast<const std::byte*>(address), size};
  }
  ::close(descriptor);  // the mapping keeps the file
  try {
    header_ = parse_safetensors_header(mapping_, size, path_);
  } catch (...) {
    unmap();
    throw;
  }
  release(mapping_.first(static_cast<std::size_t>(header_.data_offset)));
}

SafetensorsFile::~SafetensorsFile() {
  unmap();
}

SafetensorsFile::SafetensorsFile(SafetensorsFile&& other) noexcept
    : path_(std::move(other.path_)),
      mapping_(std::exchange(other.mapping_, {})),
      header_(std::move(other.header_)) {}

SafetensorsFile& SafetensorsFile::operator=(SafetensorsFile&& other) noexcept {
  if (this != &other) {
    unmap();
    path_ = std::move(other.path_);
    mapping_ = std::exchange(other.mapping_, {});
    header_ = std::move(other.header_);
  }
  return *this;
}

void SafetensorsFile::unmap() noexcept {
  if (!mapping_.empty()) ::munmap(const_cast<std::byte*>(mapping_.data()), mapping_.size());
  mapping_ = {};
}

const TensorInfo* SafetensorsFile::find(std::string_view name) const {
  const auto found =
      std::lower_bound(header_.tensors.begin(), header_.tensors.end(), name,
                       [](const TensorInfo& tensor, std::string_view key) { return tensor.name < key; });
  return found != header_.tensors.end() && found->name == name ? &*found : nullptr;
}

std::span<const std::byte> SafetensorsFile::data(const TensorInfo& tensor) const {
  return mapping_.subspan(static_cast<std::size_t>(header_.data_offset + tensor.begin),
                          static_cast<std::size_t>(tensor.end - tensor.begin));
}

void SafetensorsFile::release(std::span<const std::byte> bytes) const noexcept {
  if (bytes.empty()) return;
  // Rounding outwards is safe: the mapping is read-only, so a neighbour's page comes back from the page
  // cache.
  static const auto page = static_cast<std::uintptr_t>(::sysconf(_SC_PAGESIZE));
  const auto begin = reinterpret_cast<std::uintptr_t>(bytes.data()) / page * page;
  const auto end = reinterpret_cast<std::uintptr_t>(bytes.data()) + bytes.size();
  ::madvise(reinterpret_cast<void*>(begin), end - begin, MADV_DONTNEED);
}

}  // namespace helix::decode
