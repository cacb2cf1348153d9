"""Name the architectures of benchmarks/corpus.py, and write each as an ONNX file with random weights.

Most are classes of the `transformers` package, at the widths and depths of their smallest published variants where
the machine's time allows, on images of ``side`` pixels; nothing is downloaded. Weights are scaled layer by layer to
outputs of unit variance (after Mishkin and Matas, "All you need is a good init", 2016): with plain random weights the
features of deep networks fade or grow, and what is left of them in eight bits says nothing about trained ones.
benchmarks/corpus_writers.py has the files of other tools. Those of Keras and Paddle begin with the weights of their
packages, and the statistics of BatchNorm alone are those of the images.
"""

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
import torch
from torch import Tensor, nn

from benchmarks.light_models import NAMES as LIGHT_NAMES
from benchmarks.light_models import SIDE as LIGHT_SIDE
from benchmarks.light_models import light_model, normalise_features
from benchmarks.zoo_networks import ZOO, Exporter
from benchmarks.zoo_training import export
from tasks.parts.onnx_graphs.foreign_form import Layout

Build = Callable[[], nn.Module]
_NUM_SCALING = 8
"""Images that tell the variances."""


@dataclass(frozen=True)
class CorpusNetwork:
    """An architecture and the file that is written of it."""

    family: str
    """What a user would look for: the name of the paper's network."""
    build: Build | None
    """None for a file of the onnx wheel or of a `writer`, and for one that another entry's file is quantized into."""
    side: int = 128
    exporter: Exporter = Exporter.dynamo
    quantized_from: str = ""
    """The entry whose file is quantized, by `writer` or by `quantize_static`; empty for a float file."""
    quantized_form: str = ""
    """QDQ or QOperator, for `quantize_static` of ONNX Runtime."""
    writer: str = ""
    """The tool of benchmarks/corpus_writers.py that writes the file; empty for those of this environment."""
    architecture: str = ""
    """The name of a float entry in the package of its writer."""
    layout: Layout = Layout.nchw


class FirstAnswer(nn.Module):
    """Return one tensor of what a model of `transformers` returns."""

    def __init__(self, model: nn.Module, answer: str) -> None:
        super().__init__()
        self.model, self.answer = model, answer

    def forward(self, images_NCHW: Tensor) -> Tensor:
        """Return the answer for images [N, 3, H, W]."""
        found = getattr(self.model(images_NCHW, return_dict=True), self.answer)
        answer: Tensor = found[-1] if isinstance(found, tuple | list) else found
        return answer


def of(model: str, answer: str = "logits", config: str = "", **sizes: Any) -> Build:
    """Return what builds a model of `transformers`; `sizes` go to its configuration."""

    def build() -> nn.Module:
        transformers = importlib.import_module("transformers")
        kind = getattr(transformers, model)
        settings = getattr(transformers, config) if config else kind.config_class
        return FirstAnswer(kind._from_config(settings(**sizes), attn_implementation="eager"), answer)

    return build


def with_backbone(model: str, backbone: str, answer: str = "logits", **sizes: Any) -> Build:
    """Return what builds a model on another one of `transformers`, named by its configuration's class."""

    def build() -> nn.Module:
        transformers = importlib.import_module("transformers")
        kind = getattr(transformers, model)
        inner = sizes.pop("backbone_sizes", {})
        config = kind.config_class(backbone_config=getattr(transformers, backbone)(**inner), **sizes)
        return FirstAnswer(kind._from_config(config, attn_implementation="eager"), answer)

    return build


def of_zoo(name: str, num_classes: int = 10) -> Build:
    """Return what builds an architecture of benchmarks/zoo_networks.py."""

    def build() -> nn.Module:
        make = ZOO[name].build
        assert make is not None, "it comes trained"
        return make(num_classes)

    return build


def of_keras(family: str, architecture: str) -> CorpusNetwork:
    """Return an architecture of `keras.applications`, whose images are [N, H, W, C]."""
    return CorpusNetwork(family, None, writer="tf2onnx", architecture=architecture, layout=Layout.nhwc)


def of_paddle(family: str, architecture: str) -> CorpusNetwork:
    """Return an architecture of `paddle.vision.models`."""
    return CorpusNetwork(family, None, writer="paddle2onnx", architecture=architecture)


_TINY = {
    "hidden_size": 192,
    "num_hidden_layers": 12,
    "num_attention_heads": 3,
    "intermediate_size": 768,
    "patch_size": 16,
    "image_size": 128,
}
"""A ViT-Ti (Touvron et al., 2021)."""
_STAGES = ["stage1", "stage2", "stage3", "stage4"]
_TS = Exporter.torchscript

_QUANTIZED = (
    ("resnet_18", "ResNet"),
    ("mobilenet_v2", "MobileNet V2"),
    ("vit_tiny", "ViT"),
    ("vgg_11", "VGG"),
)
_QUANTIZED_BY_OTHERS = (("resnet_18", "ResNet"), ("vit_tiny", "ViT"))

CORPUS: Mapping[str, CorpusNetwork] = {
    # Convolutions
    "resnet_18": CorpusNetwork("ResNet", of_zoo("resnet_18")),
    "resnet_50": CorpusNetwork("ResNet", of("ResNetForImageClassification")),
    "resnet_18_torchscript": CorpusNetwork("ResNet", of_zoo("resnet_18"), exporter=_TS),
    "regnet_y": CorpusNetwork(
        "RegNet",
        of(
            "RegNetForImageClassification",
            hidden_sizes=[32, 64, 160, 384],
            depths=[1, 3, 6, 2],
            groups_width=16,
        ),
    ),
    "bit_50": CorpusNetwork("BiT (ResNetV2)", of("BitForImageClassification")),
    "convnext_tiny": CorpusNetwork("ConvNeXt", of_zoo("convnext_tiny")),
    "convnextv2_atto": CorpusNetwork(
        "ConvNeXt V2",
        of("ConvNextV2ForImageClassification", hidden_sizes=[40, 80, 160, 320], depths=[2, 2, 6, 2]),
    ),
    "mobilenet_v1": CorpusNetwork("MobileNet V1", of("MobileNetV1ForImageClassification")),
    "mobilenet_v2": CorpusNetwork("MobileNet V2", of_zoo("mobilenet_v2")),
    "mobilenet_v2_tf": CorpusNetwork(
        "MobileNet V2, TensorFlow's padding", of("MobileNetV2ForImageClassification", tf_padding=True)
    ),
    "mobilenet_v2_deeplab": CorpusNetwork("DeepLabV3+", of("MobileNetV2ForSemanticSegmentation")),
    "mobilenet_v3_large": CorpusNetwork("MobileNet V3", of_zoo("mobilenet_v3_large")),
    "shufflenet_v2": CorpusNetwork("ShuffleNet V2", of_zoo("shufflenet_v2")),
    "efficientnet_b0": CorpusNetwork("EfficientNet", of_zoo("efficientnet_b0")),
    "yolov8n_backbone": CorpusNetwork("YOLOv8's backbone", of_zoo("yolov8n")),
    "hgnet_v2": CorpusNetwork("HGNet V2", of("HGNetV2ForImageClassification")),
    "pp_lcnet": CorpusNetwork("PP-LCNet", of("PPLCNetForImageClassification", "last_hidden_state")),
    "textnet": CorpusNetwork("TextNet", of("TextNetForImageClassification")),
    "poolformer_s12": CorpusNetwork("PoolFormer", of("PoolFormerForImageClassification")),
    "focalnet_tiny": CorpusNetwork(
        "FocalNet", of("FocalNetForImageClassification", image_size=128, depths=[2, 2, 2, 2])
    ),
    # Transformers
    "vit_tiny": CorpusNetwork("ViT", of("ViTForImageClassification", **_TINY)),
    "vit_tiny_torchscript": CorpusNetwork("ViT", of("ViTForImageClassification", **_TINY), exporter=_TS),
    "deit_tiny": CorpusNetwork("DeiT", of("DeiTForImageClassification", **_TINY)),
    "vit_msn_tiny": CorpusNetwork("ViT MSN", of("ViTMSNForImageClassification", **_TINY)),
    "ijepa_tiny": CorpusNetwork("I-JEPA", of("IJepaForImageClassification", **_TINY)),
    "beit_tiny": CorpusNetwork("BEiT", of("BeitForImageClassification", **_TINY)),
    "data2vec_tiny": CorpusNetwork("Data2Vec", of("Data2VecVisionForImageClassification", **_TINY)),
    "dinov2_tiny": CorpusNetwork(
        "DINOv2",
        of(
            "Dinov2ForImageClassification",
            hidden_size=192,
            num_attention_heads=3,
            num_hidden_layers=12,
            image_size=126,
        ),
        side=126,
    ),
    "dinov2_registers_tiny": CorpusNetwork(
        "DINOv2 with registers",
        of(
            "Dinov2WithRegistersForImageClassification",
            hidden_size=192,
            num_attention_heads=3,
            num_hidden_layers=12,
            image_size=126,
        ),
        side=126,
    ),
    "dinov3_tiny": CorpusNetwork(
        "DINOv3 ViT",
        of(
            "DINOv3ViTModel",
            "last_hidden_state",
            hidden_size=192,
            num_attention_heads=3,
            num_hidden_layers=12,
            intermediate_size=768,
            image_size=128,
        ),
    ),
    "dinov3_convnext": CorpusNetwork("DINOv3 ConvNeXt", of("DINOv3ConvNextModel", "last_hidden_state")),
    "siglip_tiny": CorpusNetwork(
        "SigLIP",
        of(
            "SiglipVisionModel",
            "pooler_output",
            hidden_size=192,
            num_hidden_layers=12,
            num_attention_heads=3,
            intermediate_size=768,
            image_size=128,
        ),
    ),
    "clip_tiny": CorpusNetwork(
        "CLIP",
        of(
            "CLIPVisionModel",
            "pooler_output",
            hidden_size=192,
            num_hidden_layers=12,
            num_attention_heads=3,
            intermediate_size=768,
            image_size=128,
            patch_size=16,
        ),
    ),
    "swin_tiny": CorpusNetwork("Swin", of("SwinForImageClassification", image_size=224), side=224),
    "swinv2_tiny": CorpusNetwork("Swin V2", of("Swinv2ForImageClassification", image_size=256), side=256),
    "hiera_tiny": CorpusNetwork(
        "Hiera", of("HieraForImageClassification", image_size=[224, 224], depths=[1, 2, 7, 2]), side=224
    ),
    "cvt_13": CorpusNetwork("CvT", of("CvtForImageClassification")),
    "levit_128s": CorpusNetwork(
        "LeViT",
        of(
            "LevitForImageClassification",
            image_size=224,
            hidden_sizes=[128, 256, 384],
            num_attention_heads=[4, 6, 8],
            depths=[2, 3, 4],
        ),
        side=224,
    ),
    "mobilevit_s": CorpusNetwork("MobileViT", of_zoo("mobilevit_s")),
    "mobilevit_xxs": CorpusNetwork(
        "MobileViT",
        of(
            "MobileViTForImageClassification",
            hidden_sizes=[64, 80, 96],
            neck_hidden_sizes=[16, 16, 24, 48, 64, 80, 320],
            image_size=128,
        ),
    ),
    "mobilevitv2": CorpusNetwork(
        "MobileViT V2", of("MobileViTV2ForImageClassification", image_size=128, width_multiplier=0.5)
    ),
    "pvt_tiny": CorpusNetwork(
        "PVT", of("PvtForImageClassification", image_size=224, depths=[2, 2, 2, 2]), side=224
    ),
    "pvt_v2_b0": CorpusNetwork("PVT V2", of("PvtV2ForImageClassification")),
    "segformer_b0_encoder": CorpusNetwork("SegFormer's encoder", of("SegformerForImageClassification")),
    "swiftformer_xs": CorpusNetwork("SwiftFormer", of("SwiftFormerForImageClassification"), side=224),
    # Dense answers
    "segformer_b0": CorpusNetwork("SegFormer", of_zoo("segformer_b0", 6)),
    "segformer_b0_torchscript": CorpusNetwork("SegFormer", of_zoo("segformer_b0", 6), exporter=_TS),
    "mobilevit_deeplab": CorpusNetwork(
        "MobileViT with DeepLabV3", of("MobileViTForSemanticSegmentation", image_size=128)
    ),
    "mobilevitv2_deeplab": CorpusNetwork(
        "MobileViT V2 with DeepLabV3",
        of("MobileViTV2ForSemanticSegmentation", image_size=128, width_multiplier=0.5),
    ),
    "upernet_convnext": CorpusNetwork(
        "UperNet",
        with_backbone(
            "UperNetForSemanticSegmentation",
            "ConvNextConfig",
            backbone_sizes={
                "out_features": _STAGES,
                "hidden_sizes": [40, 80, 160, 320],
                "depths": [2, 2, 6, 2],
            },
            auxiliary_in_channels=160,
            hidden_size=128,
            num_labels=6,
        ),
    ),
    "upernet_swin": CorpusNetwork(
        "UperNet",
        with_backbone(
            "UperNetForSemanticSegmentation",
            "SwinConfig",
            backbone_sizes={"out_features": _STAGES, "image_size": 224},
            auxiliary_in_channels=384,
            hidden_size=128,
            num_labels=6,
        ),
        side=224,
    ),
    "dpt_tiny": CorpusNetwork(
        "DPT",
        of(
            "DPTForDepthEstimation",
            "predicted_depth",
            **_TINY,
            backbone_out_indices=[2, 5, 8, 11],
            neck_hidden_sizes=[24, 48, 96, 192],
            fusion_hidden_size=64,
        ),
    ),
    "glpn": CorpusNetwork("GLPN", of("GLPNForDepthEstimation", "predicted_depth")),
    "depth_anything": CorpusNetwork(
        "Depth Anything",
        with_backbone(
            "DepthAnythingForDepthEstimation",
            "Dinov2Config",
            "predicted_depth",
            backbone_sizes={
                "hidden_size": 192,
                "num_attention_heads": 3,
                "image_size": 126,
                "out_indices": [3, 6, 9, 12],
                "reshape_hidden_states": False,
                "apply_layernorm": True,
            },
            reassemble_hidden_size=192,
            neck_hidden_sizes=[24, 48, 96, 192],
        ),
        side=126,
    ),
    "vitmatte_backbone": CorpusNetwork(
        "ViTDet",
        of(
            "VitDetBackbone",
            "feature_maps",
            hidden_size=192,
            num_attention_heads=3,
            image_size=128,
            pretrain_image_size=128,
        ),
    ),
    "vitpose_tiny": CorpusNetwork(
        "ViTPose",
        with_backbone(
            "VitPoseForPoseEstimation",
            "VitPoseBackboneConfig",
            "heatmaps",
            backbone_sizes={
                "hidden_size": 192,
                "num_attention_heads": 3,
                "image_size": [128, 128],
                "patch_size": [16, 16],
            },
            num_labels=17,
        ),
    ),
    "swin2sr": CorpusNetwork(
        "Swin2SR",
        of(
            "Swin2SRForImageSuperResolution",
            "reconstruction",
            image_size=64,
            embed_dim=60,
            depths=[2, 2],
            num_heads=[6, 6],
        ),
        side=64,
    ),
    "maskformer_swin": CorpusNetwork(
        "MaskFormer's Swin", of("MaskFormerSwinBackbone", "feature_maps", image_size=224), side=224
    ),
    "superpoint": CorpusNetwork("SuperPoint's encoder", lambda: superpoint_encoder()),
    # Detectors, as values
    "yolos_tiny": CorpusNetwork(
        "YOLOS",
        of("YolosForObjectDetection", **(_TINY | {"image_size": [128, 128]}), num_detection_tokens=20),
    ),
    "detr": CorpusNetwork(
        "DETR",
        with_backbone(
            "DetrForObjectDetection",
            "ResNetConfig",
            backbone_sizes={
                "hidden_sizes": [64, 128, 256, 512],
                "depths": [2, 2, 2, 2],
                "layer_type": "basic",
                "out_features": ["stage4"],
            },
            encoder_layers=2,
            decoder_layers=2,
            num_queries=20,
        ),
    ),
    "rt_detr": CorpusNetwork("RT-DETR", of("RTDetrForObjectDetection", num_queries=50), side=256),
    "rt_detr_v2": CorpusNetwork(
        "RT-DETR V2", of("RTDetrV2ForObjectDetection", num_queries=50), side=256, exporter=_TS
    ),
    "d_fine": CorpusNetwork("D-FINE", of("DFineForObjectDetection", num_queries=50), side=256, exporter=_TS),
    "pp_ocr_v5_det": CorpusNetwork(
        "PP-OCRv5's detector", of("PPOCRV5MobileDetForObjectDetection", "last_hidden_state")
    ),
    "pp_ocr_v5_rec": CorpusNetwork(
        "PP-OCRv5's reader", of("PPOCRV5MobileRecForTextRecognition", "last_hidden_state")
    ),
    # Written here
    "vgg_11": CorpusNetwork("VGG", lambda: vgg()),
    "unet_transposed": CorpusNetwork("U-Net", lambda: UNet()),
    "unet_group_norm": CorpusNetwork("U-Net with GroupNorm", lambda: UNet(norm=group_norm)),
    "unet_instance_norm": CorpusNetwork("U-Net with InstanceNorm", lambda: UNet(norm=nn.InstanceNorm2d)),
    "unet_torchscript": CorpusNetwork("U-Net", lambda: UNet(), exporter=_TS),
    "espcn": CorpusNetwork("ESPCN", lambda: espcn()),
    "crnn": CorpusNetwork("CRNN", lambda: Crnn()),
    **{
        f"onnx_{name}": CorpusNetwork(name, None, side=LIGHT_SIDE, exporter=Exporter.published)
        for name in LIGHT_NAMES
    },
    # Files that are quantized already
    **{
        f"{name}_{form.lower()}": CorpusNetwork(family, None, quantized_from=name, quantized_form=form)
        for name, family in _QUANTIZED
        for form in ("QDQ", "QOperator")
    },
    **{
        f"{name}_{tool}": CorpusNetwork(family, None, quantized_from=name, writer=tool)
        for name, family in _QUANTIZED_BY_OTHERS
        for tool in ("nncf", "aimet", "modelopt")
    },
    # Exported by other frameworks
    "keras_mobilenet_v2": of_keras("MobileNet V2", "MobileNetV2"),
    "keras_efficientnet_b0": of_keras("EfficientNet", "EfficientNetB0"),
    "paddle_resnet_18": of_paddle("ResNet", "resnet18"),
    "paddle_mobilenet_v3_small": of_paddle("MobileNet V3", "mobilenet_v3_small"),
}


def group_norm(channels: int) -> nn.Module:
    """Return a GroupNorm of groups of eight channels."""
    return nn.GroupNorm(channels // 8, channels)


class UNet(nn.Module):
    """Four levels with transposed convolutions (Ronneberger et al., 2015), a quarter of the paper's width."""

    def __init__(self, norm: Callable[[int], nn.Module] = nn.BatchNorm2d, num_classes: int = 4) -> None:
        super().__init__()
        widths = [16, 32, 64, 128]
        self.down = nn.ModuleList(
            double(given, width, norm) for given, width in zip([3, *widths], widths, strict=False)
        )
        self.up = nn.ModuleList(nn.ConvTranspose2d(wide, wide // 2, 2, 2) for wide in reversed(widths[1:]))
        self.join = nn.ModuleList(double(wide, wide // 2, norm) for wide in reversed(widths[1:]))
        self.head = nn.Conv2d(widths[0], num_classes, 1)

    def forward(self, images_NCHW: Tensor) -> Tensor:
        """Return logits [N, classes, H, W]."""
        maps, kept = images_NCHW, []
        for level, block in enumerate(self.down):
            maps = block(nn.functional.max_pool2d(maps, 2) if level else maps)
            kept.append(maps)
        for up, join, skip in zip(self.up, self.join, reversed(kept[:-1]), strict=True):
            maps = join(torch.cat([up(maps), skip], dim=1))
        logits: Tensor = self.head(maps)
        return logits


def double(given: int, width: int, norm: Callable[[int], nn.Module]) -> nn.Sequential:
    """Return two convolutions of 3x3, each with a norm and a ReLU."""
    layers: list[nn.Module] = []
    for inputs in (given, width):
        layers += [nn.Conv2d(inputs, width, 3, padding=1, bias=False), norm(width), nn.ReLU()]
    return nn.Sequential(*layers)


class Crnn(nn.Module):
    """Convolutions and a bidirectional LSTM that reads columns as a sequence (Shi et al., 2015): [N, T, C]."""

    def __init__(self, num_classes: int = 37) -> None:
        super().__init__()
        self.features = nn.Sequential(
            *double(3, 32, nn.BatchNorm2d),
            nn.MaxPool2d(2),
            *double(32, 64, nn.BatchNorm2d),
            nn.MaxPool2d(2),
        )
        self.reader = nn.LSTM(64, 64, bidirectional=True, batch_first=True)
        self.head = nn.Linear(128, num_classes)

    def forward(self, images_NCHW: Tensor) -> Tensor:
        """Return logits [N, T, classes] of T columns."""
        columns_NTC = self.features(images_NCHW).mean(dim=2).transpose(1, 2)
        logits: Tensor = self.head(self.reader(columns_NTC)[0])
        return logits


def vgg() -> nn.Module:
    """Eleven layers (Simonyan and Zisserman, 2014) at a quarter of the width, with a head behind a mean."""
    layers: list[nn.Module] = []
    given = 3
    for width, count in ((16, 1), (32, 1), (64, 2), (128, 2), (128, 2)):
        for _ in range(count):
            layers += [nn.Conv2d(given, width, 3, padding=1), nn.ReLU()]
            given = width
        layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10))


def espcn() -> nn.Module:
    """Sub-pixel convolutions for twice the resolution (Shi et al., 2016)."""
    return nn.Sequential(
        nn.Conv2d(3, 64, 5, padding=2),
        nn.Tanh(),
        nn.Conv2d(64, 32, 3, padding=1),
        nn.Tanh(),
        nn.Conv2d(32, 12, 3, padding=1),
        nn.PixelShuffle(2),
    )


def superpoint_encoder() -> nn.Module:
    """The convolutions of SuperPoint (DeTone et al., 2018); what it does with its answers is no network."""
    transformers = importlib.import_module("transformers")
    model = transformers.SuperPointForKeypointDetection(transformers.SuperPointConfig())

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = model.encoder

        def forward(self, images_NCHW: Tensor) -> Tensor:
            maps: Tensor = self.encoder(images_NCHW[:, :1])[0]
            return maps

    return Encoder()


def write_file(name: str, file: Path, images_NCHW: Tensor) -> None:
    """Write the ONNX file of a float entry; the images, normalised, tell how its layers are scaled."""
    spec = CORPUS[name]
    torch.manual_seed(0)
    if spec.exporter is Exporter.published:
        model = light_model(name.removeprefix("onnx_"))
        normalise_features(model, images_NCHW[:_NUM_SCALING].numpy())
        onnx.save(model, file)
        return
    assert spec.build is not None
    network = spec.build().eval()
    scale_layers(network, images_NCHW[:_NUM_SCALING])
    export(network, file, spec.exporter, side=spec.side)


def scale_layers(network: nn.Module, images_NCHW: Tensor) -> None:
    """Divide the weights of each layer by the deviation of what it answers, in the order in which they run."""
    kinds = (nn.Conv2d, nn.ConvTranspose2d, nn.Linear)

    def scale(layer: nn.Module, _: Sequence[Any], answer: Tensor) -> Tensor:
        if id(layer) in done:
            return answer
        done.add(id(layer))
        deviation = float(answer.std())
        if deviation < _LEAST_DEVIATION:
            return answer
        for parameter in layer.parameters(recurse=False):
            parameter.data /= deviation
        return answer / deviation

    done: set[int] = set()
    hooks = [layer.register_forward_hook(scale) for layer in network.modules() if isinstance(layer, kinds)]
    with torch.no_grad():
        network(images_NCHW)
    for hook in hooks:
        hook.remove()


_LEAST_DEVIATION = 1e-6
"""A layer with less answers the same for all images, such as one whose weights begin at zero."""
