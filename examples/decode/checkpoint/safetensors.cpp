// SPDX-License-Identifier: Apache-2.0
// Reading the headers and the data of safetensors files.
#include "checkpoint/safetensors.hpp"

#include <algorithm>
#include <array>
#include <limits>
#include <utility>

#include <helix/error.hpp>

#include "files/json_events.hpp"
#include "files/strict_json.hpp"
#include "files/text_file.hpp"

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

/// Takes the header's JSON event by event and stops at the first event that the format does not allow. A
/// hostile header therefore cannot nest, and costs only a few times its own bytes, for one text that holds
/// all of them.
class HeaderReader : public JsonEvents {
 public:
  using JsonEvents::JsonEvents;

  std::vector<TensorInfo> take_tensors() { return std::move(tensors_); }

  bool number_integer(std::int64_t value) override {
    return unexpected("the negative number " + std::to_string(value));
  }

  bool number_unsigned(std::uint64_t value) override {
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
    return JsonEvents::number_unsigned(value);
  }

  bool string(std::string& value) override {
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
    return JsonEvents::string(value);
  }

  bool start_object(std::size_t) override {
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

  bool key(std::string& key) override {
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

  bool end_object() override {
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
        if (tensors_.size() == kMaxTensors) fail("is one of more than ", kMaxTensors, " tensors");
        tensors_.push_back(std::move(tensor_));
        tensor_ = {};
        state_ = State::top;
        return true;
      default:
        return unexpected("the end of an object");
    }
  }

  bool start_array(std::size_t) override {
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

  bool end_array() override {
    if (state_ == State::offsets && num_offsets_ != 2) {
      fail("data_offsets holds ", num_offsets_, " numbers; expected 2");
    }
    state_ = State::tensor;
    return true;
  }

  bool parse_error(std::size_t position, std::string_view why) override {
    throw Error(ErrorCode::invalid_file, file(), ": header is not valid JSON at byte ", position, ": ",
                printable(why));
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

  bool unexpected(const std::string& what) override {
    switch (state_) {
      case State::tensor_value:
        fail("is ", what, "; expected an object of dtype, shape and data_offsets");
      case State::dtype_value:
        fail("dtype is ", what, "; expected one of ", type_names());
      case State::shape_value:
        fail("shape is ", what, "; expected an array of whole numbers");
      case State::shape:
        fail("shape holds ", what, "; expected whole numbers");
      case State::offsets_value:
        fail("data_offsets is ", what, "; expected [begin, end]");
      case State::offsets:
        fail("data_offsets holds ", what, "; expected two whole numbers");
      default:
        fail("unexpected ", what);
    }
  }

  template <class... Parts>
  [[noreturn]] void fail(const Parts&... parts) {
    if (state_ == State::start || state_ == State::top) {
      throw Error(ErrorCode::invalid_file, file(), ": header: ", parts...);
    }
    if (state_ == State::metadata_start || state_ == State::metadata || state_ == State::metadata_value) {
      throw Error(ErrorCode::invalid_file, file(), ": header: __metadata__: ", parts...,
                  "; expected strings");
    }
    throw Error(ErrorCode::invalid_file, file(), ": tensor ", printable(tensor_.name), ": ", parts...);
  }

  State state_ = State::start;
  TensorInfo tensor_;
  bool has_dtype_ = false;
  bool has_shape_ = false;
  bool has_offsets_ = false;
  bool has_metadata_ = false;
  int num_offsets_ = 0;
  std::vector<TensorInfo> tensors_;
};

/// Checks that the type, shape and offsets of one tensor agree, and that the tensor lies inside the data.
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

/// First byte of a tensor, and one past its last.
using Extent = std::pair<std::uint64_t, std::uint64_t>;

/// Checks that every byte of the data belongs to exactly one tensor. `extents` are those of `tensors`, in any
/// order.
void check_coverage(std::vector<Extent> extents, const std::vector<TensorInfo>& tensors,
                    std::uint64_t data_bytes, std::string_view file) {
  // In most headers the tensors already have the order of the data.
  if (!std::is_sorted(extents.begin(), extents.end())) std::sort(extents.begin(), extents.end());
  std::uint64_t covered = 0;
  for (const Extent& extent : extents) {
    const auto [begin, end] = extent;
    if (begin != covered) {
      const auto tensor = std::find_if(tensors.rbegin(), tensors.rend(), [&](const TensorInfo& other) {
        return Extent(other.begin, other.end) == extent;
      });
      HELIX_EXPECTS(begin > covered, ErrorCode::invalid_file, file, ": tensor ", printable(tensor->name),
                    ": data_offsets [", begin, ", ", end, "] overlap another tensor that ends at ", covered);
      throw Error(ErrorCode::invalid_file, file, ": tensor ", printable(tensor->name), ": data_offsets [",
                  begin, ", ", end, "] leave a hole: no tensor has bytes [", covered, ", ", begin, ")");
    }
    covered = end;
  }
  HELIX_EXPECTS(covered == data_bytes, ErrorCode::invalid_file, file, ": tensors end at byte ", covered,
                " of the data, which has ", data_bytes);
}

/// The header's length, read from the beginning of the file; `bytes` has at least 8.
std::uint64_t header_length(std::span<const std::byte> bytes) {
  std::uint64_t length = 0;
  for (unsigned i = 0; i < kLengthBytes; ++i) length |= static_cast<std::uint64_t>(bytes[i]) << (8 * i);
  return length;
}

/// The beginning of the file: the header, cut to the size of the file and the format's limit.
std::vector<std::byte> read_header(const RegularFile& file) {
  std::vector<std::byte> bytes(static_cast<std::size_t>(std::min(file.size(), kLengthBytes)));
  file.read(0, bytes);
  if (bytes.size() < kLengthBytes) return bytes;
  const std::uint64_t length = std::min(header_length(bytes), file.size() - kLengthBytes);
  if (length > kMaxHeaderBytes) return bytes;
  bytes.resize(static_cast<std::size_t>(kLengthBytes + length));
  file.read(0, bytes);
  return bytes;
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
  expect_no_lfs_pointer({reinterpret_cast<const char*>(bytes.data()), kLengthBytes}, file);
  const std::uint64_t header_bytes = header_length(bytes);
  HELIX_EXPECTS(header_bytes <= kMaxHeaderBytes, ErrorCode::invalid_file, file, ": header size is ",
                header_bytes, "; the format allows at most ", kMaxHeaderBytes,
                ": this is no safetensors file");
  const std::uint64_t available = std::min<std::uint64_t>(file_size, bytes.size()) - kLengthBytes;
  HELIX_EXPECTS(header_bytes <= available, ErrorCode::invalid_file, file, ": header size is ", header_bytes,
                ", but only ", available, " bytes follow: the file is truncated");
  const std::string_view text(reinterpret_cast<const char*>(bytes.data()) + kLengthBytes,
                              static_cast<std::size_t>(header_bytes));
  HELIX_EXPECTS(text.starts_with('{'), ErrorCode::invalid_file, file, ": header does not start with '{'");

  HeaderReader reader(file);
  reader.parse(text);

  SafetensorsHeader header;
  header.tensors = reader.take_tensors();
  header.data_offset = kLengthBytes + header_bytes;
  std::vector<Extent> extents;
  extents.reserve(header.tensors.size());
  for (const TensorInfo& tensor : header.tensors) extents.emplace_back(tensor.begin, tensor.end);
  const auto is_before = [](const TensorInfo& a, const TensorInfo& b) { return a.name < b.name; };
  if (!std::is_sorted(header.tensors.begin(), header.tensors.end(), is_before)) {
    std::sort(header.tensors.begin(), header.tensors.end(), is_before);
  }
  const auto twin =
      std::adjacent_find(header.tensors.begin(), header.tensors.end(),
                         [](const TensorInfo& a, const TensorInfo& b) { return a.name == b.name; });
  HELIX_EXPECTS(twin == header.tensors.end(), ErrorCode::invalid_file, file, ": tensor ",
                printable(twin->name), " appears twice");
  const std::uint64_t data_bytes = file_size - header.data_offset;
  for (const TensorInfo& tensor : header.tensors) check_extent(tensor, data_bytes, file);
  check_coverage(std::move(extents), header.tensors, data_bytes, file);
  return header;
}

SafetensorsFile::SafetensorsFile(const std::string& path) : file_(path) {
  header_ = parse_safetensors_header(read_header(file_), file_.size(), path);
  mapping_ = std::make_shared<const MappedFile>(file_);
}

const TensorInfo* SafetensorsFile::find(std::string_view name) const {
  const auto found =
      std::lower_bound(header_.tensors.begin(), header_.tensors.end(), name,
                       [](const TensorInfo& tensor, std::string_view key) { return tensor.name < key; });
  return found != header_.tensors.end() && found->name == name ? &*found : nullptr;
}

void SafetensorsFile::read(const TensorInfo& tensor, std::uint64_t offset,
                           std::span<std::byte> target) const {
  file_.read(this->offset(tensor) + offset, target);
}

std::span<const std::byte> SafetensorsFile::data(const TensorInfo& tensor) const {
  return mapping_->bytes().subspan(static_cast<std::size_t>(offset(tensor)),
                                   static_cast<std::size_t>(tensor.end - tensor.begin));
}

void SafetensorsFile::prefault(std::span<const std::byte> bytes) const {
  file_.expect_whole();
  mapping_->prefault(bytes);
}

void SafetensorsFile::release(std::span<const std::byte> bytes) const noexcept {
  mapping_->release(bytes);
}

}  // namespace helix::decode
