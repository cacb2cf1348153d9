"""Names of tactics as TensorRT 7 to 11 log and report them for GPUs from Volta to Blackwell."""

import json

import pytest

from tasks.parts.engines.tensorrt.inspector import read_layers
from tasks.parts.engines.tensorrt.tactics import Unit, count_units, sum_up_units, unit_of

INT8 = (
    "sm80_xmma_fprop_implicit_gemm_interleaved_i8i8_i8i32_f32_nchw_vect_c_32kcrs_vect_c_32_nchw_vect_c_32_"
    "tilesize256x128x64_stage4_warpsize4x2x1_g1_tensor16x8x32_simple_t1r1s1_epifadd"
)
SPARSE = (
    "sm80_xmma_fprop_sparse_conv_f16f16_f16f16_f16_nhwckrsc_nhwc_tilesize128x128x64_stage3_warpsize2x2x1_g1_"
    "sptensor16x8x32_t1r3s3"
)
FLOAT = (
    "sm80_xmma_fprop_implicit_gemm_indexed_f32f32_f32f32_f32_nchwkcrs_nchw_tilesize64x64x8_stage3_warpsize1x4x1_g1_"
    "ffma_aligna4_alignc4"
)
GENERATED = "__myl_AddCastMeanSubMulMeanAddSqrtDivMulCastMulAdd_0xf2543c36ff9f104bbb1655b0183afb47"


@pytest.mark.parametrize(
    "tactic",
    [
        INT8,
        "sm70_xmma_fprop_implicit_gemm_f16f16_f16f16_f16_nhwckrsc_nhwc_tilesize128x64x32_stage1_warpsize2x2x1_g1_"
        "tensor8x8x4_t1r1s1",
        "sm80_xmma_fprop_implicit_gemm_tf32f32_tf32f32_f32_nhwckrsc_nchw_tilesize128x128x16_stage4_warpsize2x2x1_g1_"
        "tensor16x8x8",
        "sm80_xmma_gemm_f16f16_f16f16_f16_nn_n_tilesize32x32x64_stage6_warpsize2x2x1_tensor16x8x16",
        "sm90_xmma_gemm_f16f16_f16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute_segment_k_off_kernel",
        "sm90_xmma_gemm_f32f32_tf32f32_f32_tn_n_tilesize128x128x32_warpgroupsize1x1x1_execute_kernel",
        "turing_h1688cudnn_256x128_ldg8_relu_exp_medium_nhwc_tn_v1",
        "trt_volta_h884cudnn_256x64_ldg8_relu_exp_small_nhwc_tn_v1",
        "volta_int8_i8816cudnn_int8_256x64_ldg16_relu_singleBuffer_medium_nt_v1",
        "ampere_bf16_s16816gemm_bf16_256x128_ldg8_f2f_stages_64x3_nn",
        "cutlass_tensorop_f16_s16816fprop_optimized_f16_64x64_32x6_nhwc_align8",
        "cutlass_tensorop_s1688fprop_optimized_tf32_64x64_16x10_nhwc_align4",
        "cutlass3x_sm90_tensorop_s64x128x16gemm_f16_f16_f32_void_f16_128x128x64_2x1x1_0_tnn_align8",
    ],
)
def test_instructions_of_tensor_cores_are_recognised(tactic: str) -> None:
    assert unit_of(tactic) is Unit.tensor_cores


@pytest.mark.parametrize(
    "tactic",
    [
        SPARSE,
        "sm80_xmma_fprop_sparse_conv_interleaved_i8i8_i8i32_f32_nchw_vect_c_32kcrs_vect_c_32_nchw_vect_c_32",
        "sm80_xmma_fprop_avdt_sparse_int8int8_int8",
        "cutlass_80_tensorop_f16_s16832spgemm_f16_128x64_64x3_tn_align8",
    ],
)
def test_sparse_kernels_are_told_from_dense_ones(tactic: str) -> None:
    assert unit_of(tactic) is Unit.sparse_tensor_cores


@pytest.mark.parametrize(
    "tactic",
    [
        FLOAT,
        "ampere_scudnn_128x64_relu_xregs_large_nn_v1",
        "_5x_cudnn_ampere_scudnn_128x32_relu_interior_nn_v1",
        "trt_volta_hcudnn_128x64_relu_small_nn_v1",
        "volta_int8x4_icudnn_int8x4_128x32_relu_small_nn_v1",
        "ampere_sgemm_128x128_nt",
        "cutlass_80_simt_sgemm_256x128_8x4_nn_align1",
        "sm50_xmma_pooling_max_f32",
    ],
)
def test_kernels_without_tensor_cores_are_recognised(tactic: str) -> None:
    assert unit_of(tactic) is Unit.cuda_cores


@pytest.mark.parametrize(
    "tactic",
    [
        "",
        "0x0000000000000000",
        GENERATED,
        "sm80_xmma_fprop_avdt_dense_int8int8_int8",
        "sm90_xmma_gemm_f32f32_f32_nn_n_tilesize128x128x32_warpgroupsize1x1x1_execute_segment_k_on_kernel",
        "generatedNativePointwise",
        "copyVectorizedKernel",
    ],
)
def test_name_that_does_not_tell_gives_no_guess(tactic: str) -> None:
    assert unit_of(tactic) is Unit.unknown


def test_layer_has_the_unit_beside_the_name_of_its_kernel() -> None:
    said = [
        {"Name": "a", "LayerType": "CaskConvolution", "TacticName": SPARSE},
        {"Name": "b", "LayerType": "kgen", "TacticName": GENERATED},
    ]
    sparse, generated = read_layers(json.dumps({"Layers": said}))
    assert sparse.kernel == f"{SPARSE} (Tensor Cores with 2:4 sparsity)" and generated.kernel == GENERATED
    assert unit_of(sparse.kernel) is Unit.sparse_tensor_cores


def test_kernels_are_counted_by_unit() -> None:
    counts = count_units([INT8, INT8, SPARSE, FLOAT, GENERATED, ""])
    assert counts == {"Tensor Cores": 2, "Tensor Cores with 2:4 sparsity": 1, "CUDA cores": 1}
    told = sum_up_units(counts, may_be_sparse=True)
    assert told == "2 on Tensor Cores, 1 on Tensor Cores with 2:4 sparsity, 1 on CUDA cores"


def test_sparsity_is_claimed_only_where_a_name_proves_it() -> None:
    dense = count_units([INT8, GENERATED])
    assert sum_up_units(dense, may_be_sparse=False) == "1 on Tensor Cores"
    not_claimed = "2:4 sparsity is not claimed, no name has it"
    assert sum_up_units(dense, may_be_sparse=True) == f"1 on Tensor Cores; {not_claimed}"
    unknown = sum_up_units(count_units([GENERATED]), may_be_sparse=True)
    assert unknown == f"their names do not tell on which units; {not_claimed}"
