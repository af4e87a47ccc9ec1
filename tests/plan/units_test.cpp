// SPDX-License-Identifier: Apache-2.0
// The planner's units: operations that must not compile, and exact results of those that do.
#include <helix/plan/units.hpp>

#include "support/catch.hpp"

namespace {

using namespace helix::plan;

template <class A, class B>
concept Addable = requires(A a, B b) {
  a + b;
};
template <class A, class B>
concept Comparable = requires(A a, B b) {
  a < b;
};
template <class A, class B>
concept Assignable = requires(A a, B b) {
  a = b;
};
template <class A, class B>
concept Multipliable = requires(A a, B b) {
  a* b;
};

// Meaningful operations compile.
static_assert(Addable<Time, Time> && Addable<Bytes, Bytes> && Comparable<Tokens, Tokens>);
static_assert(Multipliable<Bytes, int> && Multipliable<double, Time>);
static_assert(std::is_same_v<decltype(Bytes{} / Bandwidth{}), Time>);
static_assert(std::is_same_v<decltype(Flops{} / FlopRate{}), Time>);
static_assert(std::is_same_v<decltype(Bytes{} / Time{}), Bandwidth>);
static_assert(std::is_same_v<decltype(Bandwidth{} * Time{}), Bytes>);
static_assert(std::is_same_v<decltype(Tokens{} * (Bytes{} / Tokens{})), Bytes>);
static_assert(std::is_same_v<decltype(Tokens{} / Time{}), TokenRate>);
static_assert(std::is_same_v<decltype(Time{} / Time{}), double>);

// Mistakes do not compile.
static_assert(!Addable<Bytes, Time> && !Addable<Bytes, Tokens> && !Addable<Bytes, Flops>);
static_assert(!Addable<Bytes, double> && !Addable<Time, int>);
static_assert(!Comparable<Bytes, Time> && !Comparable<Time, double> && !Comparable<Bandwidth, FlopRate>);
static_assert(!Assignable<Time&, double> && !Assignable<double&, Time> && !Assignable<Bytes&, Tokens>);
static_assert(!std::is_constructible_v<Bytes, double> && !std::is_constructible_v<Time, Bytes>);
static_assert(!std::is_convertible_v<Bytes, double> && !std::is_convertible_v<Tokens, long>);
static_assert(!std::is_same_v<decltype(Bytes{} * Bandwidth{}), Time>);
static_assert(!std::is_same_v<decltype(Bytes{} / FlopRate{}), Time>);

TEST_CASE("quotients of whole bytes and bandwidths are as exact as literals") {
  CHECK(in_microseconds(bytes(1895825408) / gigabytes_per_second(8000)) == 236.978176);
  CHECK(in_microseconds(bytes(31457280) / gigabytes_per_second(8000)) == 3.932160);
  CHECK(in_bytes(packed_bytes(3, 4)) == 1.5);
  CHECK(in_bytes(packed_bytes(32, 4.25)) == 17);
}

TEST_CASE("named units agree with each other") {
  CHECK(milliseconds(1) == microseconds(1000));
  CHECK(seconds(1) == milliseconds(1000));
  CHECK(in_seconds(seconds(3)) == 3);
  CHECK(gigabytes(1) == bytes(1e9));
  CHECK(gigabytes(5) / seconds(1) == gigabytes_per_second(5));
  CHECK(flops(2e12) / seconds(1) == teraflops_per_second(2));
  CHECK(in_tokens_per_second(tokens(1) / milliseconds(4)) == 250);
  CHECK(bytes(7) / Bandwidth::unlimited() == Time{});
}

}  // namespace
