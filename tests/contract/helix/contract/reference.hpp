// SPDX-License-Identifier: Apache-2.0
// Every operation as one scalar loop in double precision, straight from its definition: the oracle of the
// suites.
#pragma once

#include <helix/contract/reference/attention.hpp>
#include <helix/contract/reference/dense.hpp>
#include <helix/contract/reference/elements.hpp>
#include <helix/contract/reference/exchange.hpp>
#include <helix/contract/reference/vocabulary.hpp>

/// The operations on host memory, at once.
namespace helix::contract::reference {}
