"""Open Inference Protocol over gRPC."""
