"""What looking for near-duplicates costs prepare_data: hashing images, and comparing val and test with train.

python -m benchmarks.duplicates --num_images 100000
"""

import argparse
import time

import numpy as np

from tasks.parts.sources.duplicates import Pixels, find_duplicates, perceptual_hash

_SIZES = ((256, 256), (512, 1024), (1024, 2048))
_REPEATS = 50


def main() -> None:
    """Print both costs, in time of one core."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--num_images", type=int, default=100_000)
    num_images = parser.parse_args().num_images
    rng = np.random.default_rng(0)
    for height, width in _SIZES:
        image_HWC = rng.integers(256, size=(height, width, 3)).astype(np.uint8)
        perceptual_hash(image_HWC)
        start = time.process_time()
        for _ in range(_REPEATS):
            perceptual_hash(image_HWC)
        seconds = (time.process_time() - start) / _REPEATS
        print(f"hash of {height} x {width}: {1000 * seconds:.2f} ms, {1 / seconds:.0f} images/s")
    hashes = rng.integers(2**63, size=num_images)
    images = {str(number): Pixels(number, str(number), int(value)) for number, value in enumerate(hashes)}
    names, num_held = list(images), num_images // 8
    splits = {"val": names[:num_held], "test": names[num_held : 2 * num_held], "train": names[2 * num_held :]}
    start = time.process_time()
    found = find_duplicates(splits, images)
    print(f"comparison of {num_images} images: {time.process_time() - start:.1f} s, {found.num_near} found")


if __name__ == "__main__":
    main()
