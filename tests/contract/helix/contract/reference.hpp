// SPDX-License-Identifier: Apache-2.0
// The reference of the suites: every operation as one scalar loop in double precision, straight from its
// definition.
#pragma once

#include <helix/contract/reference/attention.hpp>
#include <helix/contract/reference/dense.hpp>
#include <helix/contract/reference/elements.hpp>
#include <helix/contract/reference/exchange.hpp>
#include <helix/contract/reference/vocabulary.hpp>

/// The operations on host memory, executed immediately.
namespace helix::contract::reference {}
