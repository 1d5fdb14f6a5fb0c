// SPDX-License-Identifier: BSD-3-Clause
#include "args/cascade.h"

#include <ATen/core/DimVector.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <optional>
#include <sstream>
#include <string>
#include <utility>

#include "args/checks.h"
#include "args/empty_tensor.h"

namespace tree_attention {
namespace {

constexpr const char* kOp = "cascade_decode";

// Pages [begin, end) of a sequence's table that have keys which its queries see.
struct Pages {
  int64_t begin, end;

  int64_t num_between(int64_t first, int64_t last) const {
    return std::max<int64_t>(0, std::min(end, last) - std::max(begin, first));
  }
};

// A page table as the host reads it: with a list for each head, a page is the same where all heads
// have the same ids.
template <typename Id>
class Table {
 public:
  explicit Table(const at::Tensor& table)
      : ids_(elements<Id>(table)),
        num_heads_(table.dim() == 3 ? table.size(1) : 1),
        row_stride_(table.stride(0)),
        head_stride_(table.dim() == 3 ? table.stride(1) : 0) {}

  // The first place in [begin, end) where two sequences have another page, or end.
  int64_t first_difference(int64_t row, int64_t other, int64_t begin, int64_t end) const {
    for (int64_t head = 0; head < num_heads_; ++head) {
      const Id* a = list(row, head);
      end = std::mismatch(a + begin, a + end, list(other, head) + begin).first - a;
    }
    return end;
  }

  // The sequences that have the same page at a place, where several do, in their order.
  std::vector<std::vector<int64_t>> by_page(std::vector<int64_t> rows, int64_t place) const {
    std::stable_sort(rows.begin(), rows.end(), [&](int64_t a, int64_t b) {
      for (int64_t head = 0; head < num_heads_; ++head) {
        const Id of_a = list(a, head)[place], of_b = list(b, head)[place];
        if (of_a != of_b) return of_a < of_b;
      }
      return false;
    });
    std::vector<std::vector<int64_t>> found;
    for (size_t begin = 0, end; begin < rows.size(); begin = end) {
      for (end = begin + 1; end < rows.size(); ++end) {
        if (first_difference(rows[begin], rows[end], place, place + 1) == place) break;
      }
      if (end - begin > 1) found.emplace_back(rows.begin() + begin, rows.begin() + end);
    }
    return found;
  }

 private:
  const Id* list(int64_t row, int64_t head) const {
    return ids_ + row * row_stride_ + head * head_stride_;
  }

  const Id* ids_;
  const int64_t num_heads_, row_stride_, head_stride_;
};

// What a group saves and costs, in values that a core reads and multiplies. Measured on Zen 4 with
// products of bfloat16, one and two threads, keys in the caches, and groups of 2 to 16 sequences
// with 64 to 4,096 keys in common of 1 to 8 kv heads for 1 to 16 query heads each: one call more
// takes 18 us, on two threads as long as 3 million values, and one state more, which is written as
// float32 and merged, 1 ns for each value, as long as 80. With another dtype or width they shift by
// less than a factor of two. Where keys are not in a cache more is saved. They do not depend on the
// number of threads, nor therefore the bits.
class Costs {
 public:
  // With query heads and kv heads of so many columns.
  Costs(int64_t heads, int64_t heads_kv, int64_t columns, int64_t columns_v, bool has_8_bits)
      : of_key_(heads_kv * (columns + columns_v)),
        of_group_(3'000'000),
        of_row_(80 * heads * columns_v) {
    if (has_8_bits) of_key_ *= 2;         // such keys are widened for each sequence
    if (heads == heads_kv) of_key_ *= 2;  // reading them takes longer than multiplying
  }
  // A group pays which saves so many reads of a key.
  explicit Costs(int64_t least_keys_saved)
      : of_key_(1), of_group_(std::max<int64_t>(1, least_keys_saved)), of_row_(0) {}

  // What a group saves in the end.
  int64_t gain(int64_t keys_saved, int64_t num_rows) const {
    return keys_saved * of_key_ - of_group_ - num_rows * of_row_;
  }
  // What sequences cost that are in no group, whose states are written and read again, too.
  int64_t of_others(int64_t num_rows) const { return num_rows * of_row_ / 2; }

 private:
  int64_t of_key_, of_group_, of_row_;
};

// Sequences with the pages [begin, compared) in common.
struct Candidate {
  std::vector<int64_t> rows;
  int64_t begin, compared;
};

template <typename Id>
std::vector<PageGroup> find_groups(const Table<Id>& table, const std::vector<Pages>& seen,
                                   int64_t page_size, const Costs& costs) {
  std::vector<PageGroup> found;
  int64_t gain = 0, num_others = static_cast<int64_t>(seen.size());
  std::vector<Candidate> waiting;
  const auto divide = [&](const std::vector<int64_t>& rows, int64_t place, int64_t begin) {
    std::vector<int64_t> longer;
    for (const int64_t row : rows) {
      if (place < seen[row].end) longer.push_back(row);
    }
    for (std::vector<int64_t>& same : table.by_page(std::move(longer), place)) {
      waiting.push_back({std::move(same), begin, place + 1});
    }
  };
  std::vector<int64_t> all(seen.size());
  std::iota(all.begin(), all.end(), 0);
  divide(all, 0, 0);
  while (!waiting.empty()) {
    const Candidate candidate = std::move(waiting.back());
    waiting.pop_back();
    const auto& [rows, begin, compared] = candidate;
    int64_t end = std::numeric_limits<int64_t>::max();
    for (const int64_t row : rows) end = std::min(end, seen[row].end);
    for (size_t i = 1; i < rows.size(); ++i) {
      end = table.first_difference(rows[0], rows[i], compared, end);
    }
    int64_t num_read = 0, most = 0;  // pages, by each sequence alone and by all at once
    for (const int64_t row : rows) {
      const int64_t num_pages = seen[row].num_between(begin, end);
      num_read += num_pages;
      most = std::max(most, num_pages);
    }
    const int64_t num_rows = static_cast<int64_t>(rows.size());
    const int64_t gained = costs.gain((num_read - most) * page_size, num_rows);
    const bool pays = gained >= 0;
    if (pays) {
      found.push_back({rows, begin, end});
      gain += gained;
      if (begin == 0) num_others -= num_rows;
    }
    // Where it does not, fewer of them may have a longer run in common, which pays. It is from the
    // same beginning: a sequence reads all before its first group by itself.
    divide(rows, end, pays ? end : begin);
  }
  if (gain < costs.of_others(num_others)) found.clear();
  return found;
}

std::vector<PageGroup> find_groups(const at::Tensor& table, const std::vector<Pages>& seen,
                                   int64_t page_size, const Costs& costs) {
  if (table.scalar_type() == at::kInt) {
    return find_groups(Table<int32_t>(table), seen, page_size, costs);
  }
  return find_groups(Table<int64_t>(table), seen, page_size, costs);
}

// For each sequence, the pages that have keys which its queries see.
std::vector<Pages> seen_pages(const DecodeArgs& args) {
  const int64_t page_size = args.k.size(2), num_pages = args.page_table->size(-1);
  const int64_t batch = args.q.size(0);
  if (!args.key_ranges) return std::vector<Pages>(batch, Pages{0, num_pages});
  const at::Tensor& ranges = *args.key_ranges;
  const bool several = ranges.dim() == 4;
  const int64_t num_ranges = several ? ranges.size(2) : 1, stride = several ? ranges.stride(2) : 0;
  std::vector<Pages> seen;
  for (int64_t row = 0; row < batch; ++row) {
    int64_t begin = num_pages * page_size, end = 0;
    for (int64_t token = 0; token < ranges.size(1); ++token) {
      const int32_t* range =
          elements<int32_t>(ranges) + row * ranges.stride(0) + token * ranges.stride(1);
      for (int64_t i = 0; i < num_ranges; ++i, range += stride) {
        const int64_t first = std::max<int64_t>(0, range[0]);
        const int64_t last = std::min<int64_t>(num_pages * page_size, range[1]);
        if (first >= last) continue;
        begin = std::min(begin, first);
        end = std::max(end, last);
      }
    }
    seen.push_back({begin / page_size, (end + page_size - 1) / page_size});
  }
  return seen;
}

std::string in_python(const PageGroup& group) {
  std::ostringstream text;
  text << "PageGroup(rows=(";
  for (size_t i = 0; i < group.rows.size(); ++i) text << (i == 0 ? "" : ", ") << group.rows[i];
  text << (group.rows.size() == 1 ? ",), begin=" : "), begin=") << group.begin
       << ", end=" << group.end << ")";
  return text.str();
}

// Whether the pages are those after the groups before it, `ends`, and the same for all its rows.
// The host compares ids where it can read them.
bool fits(const PageGroup& group, const at::Tensor& table, std::vector<int64_t>& ends) {
  const int64_t num_rows = static_cast<int64_t>(ends.size());
  if (group.rows.empty() || group.begin >= group.end || group.end > table.size(-1)) return false;
  for (const int64_t row : group.rows) {
    if (row < 0 || row >= num_rows || ends[row] != group.begin) return false;
    ends[row] = group.end;  // so that a row that comes twice does not fit
  }
  if (!table.device().is_cpu()) return true;
  const Table<int32_t> ids(table);
  return std::all_of(group.rows.begin() + 1, group.rows.end(), [&](int64_t row) {
    return ids.first_difference(group.rows[0], row, group.begin, group.end) == group.end;
  });
}

// The groups of numbers as page_groups returns them.
std::vector<PageGroup> unpack_groups(at::IntArrayRef numbers, const at::Tensor& table) {
  std::vector<PageGroup> groups;
  std::vector<int64_t> ends(table.size(0), 0);
  for (size_t place = 0; place < numbers.size();) {
    const int64_t num_rows = numbers[place++];
    CHECK_ARG(0 <= num_rows && num_rows <= static_cast<int64_t>(numbers.size() - place) - 2,
              "groups must be whole, got ", num_rows, " rows at number ", place - 1, " of ",
              numbers.size());
    const int64_t* rows = numbers.data() + place;
    place += num_rows + 2;
    groups.push_back({{rows, rows + num_rows}, rows[num_rows], rows[num_rows + 1]});
    CHECK_ARG(fits(groups.back(), table, ends),
              "groups must be those that page_groups finds in page_table, of shape ", table.sizes(),
              ", got ", in_python(groups.back()),
              ", whose sequences have not these pages in common; call page_groups again "
              "where a table has changed");
  }
  return groups;
}

at::Tensor on_device(const std::vector<int64_t>& values, at::ScalarType dtype,
                     const at::Tensor& like) {
  at::Tensor x = empty_tensor({static_cast<int64_t>(values.size())}, dtype);
  if (dtype == at::kInt) {
    std::copy(values.begin(), values.end(), x.data_ptr<int32_t>());
  } else {
    std::copy(values.begin(), values.end(), x.data_ptr<int64_t>());
  }
  return like.device().is_cpu() ? x : x.to(like.device());
}

// The distance of rows that are in order and equally far apart, and so are a view; of others 0.
int64_t distance_of(const std::vector<int64_t>& rows) {
  if (rows.size() == 1) return 1;
  const int64_t distance = rows[1] - rows[0];
  for (size_t i = 1; i < rows.size(); ++i) {
    if (rows[i] - rows[i - 1] != distance) return 0;
  }
  return std::max<int64_t>(0, distance);
}

}  // namespace

std::vector<int64_t> page_groups(const at::Tensor& page_table, at::IntArrayRef num_pages,
                                 int64_t page_size, int64_t num_heads_q, int64_t num_heads_kv,
                                 int64_t head_dim, bool has_8_bits,
                                 std::optional<int64_t> least_keys_saved) {
  const at::Tensor table = page_table.scalar_type() == at::kInt
                               ? page_table.contiguous()
                               : page_table.to(at::kLong).contiguous();
  std::vector<Pages> seen;
  for (const int64_t number : num_pages) seen.push_back({0, number});
  const Costs costs = least_keys_saved
                          ? Costs(*least_keys_saved)
                          : Costs(num_heads_q, num_heads_kv, head_dim, head_dim, has_8_bits);
  std::vector<int64_t> numbers;
  for (const PageGroup& group : find_groups(table, seen, page_size, costs)) {
    numbers.push_back(static_cast<int64_t>(group.rows.size()));
    numbers.insert(numbers.end(), group.rows.begin(), group.rows.end());
    numbers.push_back(group.begin);
    numbers.push_back(group.end);
  }
  return numbers;
}

void check_cascade(const DecodeArgs& args) {
  CHECK_ARG(args.page_table,
            "page_table is required, as it says which keys sequences have in common");
  CHECK_ARG(args.num_workers != -1,
            "num_workers must not be -1, by which no bit depends on the rest of the "
            "batch, as bits do here; use lean_decode");
}

std::vector<PageGroup> groups_of(const DecodeArgs& args, at::OptionalIntArrayRef given,
                                 std::optional<int64_t> least_keys_saved) {
  if (given) return unpack_groups(*given, *args.page_table);
  if (!args.q.device().is_cpu() || args.q.numel() == 0) return {};
  const Costs costs = least_keys_saved ? Costs(*least_keys_saved)
                                       : Costs(args.q.size(1), args.k.size(1), args.k.size(3),
                                               args.v.size(3), has_8_bits(args.k.scalar_type()));
  return find_groups(*args.page_table, seen_pages(args), args.k.size(2), costs);
}

void CascadeCall::keep() const {
  if (!kept_o.defined()) return;
  // [1, heads, rows * tokens, ...] to [rows, heads, tokens, ...]
  const auto copy = [&](const at::Tensor& from, const at::Tensor& to) {
    const int64_t num_rows = kept_rows.size(0);
    to.index_copy_(0, kept_rows, from[0].unflatten(1, {num_rows, to.size(2)}).transpose(0, 1));
  };
  copy(o, kept_o);
  copy(lse, kept_lse);
}

CascadeParts::CascadeParts(const DecodeArgs& args, const std::vector<PageGroup>& groups)
    : args_(args), groups_(groups), out_dtype_(args.out_dtype.value_or(args.q.scalar_type())) {
  const at::Tensor& q = args.q;
  args_.result_dtype = args.result_dtype.value_or(out_dtype_);
  args_.out_dtype = at::kFloat;
  std::vector<int64_t> num_states(q.size(0), 1);
  for (const PageGroup& group : groups) {
    int64_t place = 0;
    for (const int64_t row : group.rows) place = std::max(place, num_states[row]);
    for (const int64_t row : group.rows) num_states[row] = place + 1;
    places_.push_back(place);
  }
  const int64_t num_parts = *std::max_element(num_states.begin(), num_states.end());
  const auto options = q.options().dtype(at::kFloat);
  o_ = empty_tensor({num_parts, q.size(0), q.size(1), q.size(2), args.v.size(3)}, options);
  // No state is written of a group for the sequences that are not in it.
  lse_ = empty_tensor({num_parts, q.size(0), q.size(1), q.size(2)}, options).fill_(-INFINITY);
}

CascadeCall CascadeParts::of_group(size_t index) const {
  const auto& [rows, begin, end] = groups_[index];
  const int64_t num_rows = static_cast<int64_t>(rows.size()), seqlen_q = args_.q.size(2);
  const int64_t page_size = args_.k.size(2), distance = distance_of(rows);
  const bool is_view = distance != 0 && seqlen_q == 1;
  const at::Tensor places = is_view ? at::Tensor() : on_device(rows, at::kLong, args_.q);
  // The rows of x [batch, ..., seqlen_q, ...] as the tokens of one sequence, which are `axis`.
  const auto as_one = [&](const at::Tensor& x, int64_t axis) {
    if (!is_view) {
      return x.index_select(0, places).movedim(0, axis - 1).flatten(axis - 1, axis).unsqueeze(0);
    }
    at::DimVector sizes(x.sizes()), strides(x.strides());
    sizes[0] = 1;
    sizes[axis] = num_rows;
    strides[axis] = distance * strides[0];
    return x.as_strided(sizes, strides, x.storage_offset() + rows[0] * strides[0]);
  };
  CascadeCall call{args_, {}, {}, {}, {}, {}};
  call.args.q = as_one(args_.q, 2);
  const int64_t first = begin * page_size, last = end * page_size;
  if (args_.key_ranges) {
    call.args.key_ranges = as_one(*args_.key_ranges, 1).clamp(first, last);
  } else {
    call.args.key_ranges =
        on_device({first, last}, at::kInt, args_.q).expand({1, num_rows * seqlen_q, 2});
  }
  if (args_.query_positions) call.args.query_positions = as_one(*args_.query_positions, 1);
  // From the first page on, so that keys keep their positions. Only the group's are read.
  call.args.page_table = args_.page_table->narrow(0, rows[0], 1).narrow(-1, 0, end);

  const at::Tensor o = o_.select(0, places_[index]), lse = lse_.select(0, places_[index]);
  if (is_view) {
    call.o = as_one(o, 2);
    call.lse = as_one(lse, 2);
  } else {
    call.o = empty_tensor({1, o.size(1), num_rows * seqlen_q, o.size(3)}, o.options());
    call.lse = empty_tensor({1, o.size(1), num_rows * seqlen_q}, o.options());
    call.kept_o = o;
    call.kept_lse = lse;
    call.kept_rows = places;
  }
  return call;
}

CascadeCall CascadeParts::of_others() const {
  const int64_t batch = args_.q.size(0), seqlen_q = args_.q.size(2), page_size = args_.k.size(2);
  std::vector<int64_t> begins(batch, 0);
  for (const PageGroup& group : groups_) {
    for (const int64_t row : group.rows) begins[row] = group.end * page_size;
  }
  CascadeCall call{args_, o_.select(0, 0), lse_.select(0, 0), {}, {}, {}};
  if (args_.key_ranges) {
    at::DimVector shape(args_.key_ranges->dim(), 1);
    shape[0] = batch;
    call.args.key_ranges =
        args_.key_ranges->maximum(on_device(begins, at::kInt, args_.q).view(shape));
  } else {
    std::vector<int64_t> ranges;
    for (const int64_t begin : begins) {
      ranges.insert(ranges.end(), {begin, args_.page_table->size(-1) * page_size});
    }
    call.args.key_ranges =
        on_device(ranges, at::kInt, args_.q).view({batch, 1, 2}).expand({batch, seqlen_q, 2});
  }
  return call;
}

}  // namespace tree_attention
