// SPDX-License-Identifier: Apache-2.0
// Includes Catch2 as the contract suites find it.
#pragma once
#include <helix/contract/catch.hpp>
