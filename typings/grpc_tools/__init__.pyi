# SPDX-License-Identifier: Apache-2.0
# grpcio-tools ships no types; the generators use this much of it.
from grpc_tools import protoc as protoc
