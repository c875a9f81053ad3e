"""Rows of results, as a benchmark on four nodes leaves them."""

from gradweave._src.results import Result

COMPUTE_S = 0.4


def row(runtime, iteration_s, predicted_s, *, messages, repeats_s=None):
    return Result(
        trace="a",
        runtime=runtime,
        workers=4,
        nodes=4,
        ranks_per_node=1,
        rate="1gbit",
        iteration_s=iteration_s,
        predicted_s=predicted_s,
        prediction_error=predicted_s / iteration_s - 1,
        compute_s=COMPUTE_S,
        exposed_s=max(0.0, iteration_s - COMPUTE_S),
        messages=messages,
        speedup=1.0,
        repeats_s=repeats_s or (iteration_s,),
        correct=True,
        bucket_cap_mb=None,
    )
