"""Writes an archive with the library, its header, the programs and the licences for each of the wheels of gohvd in a folder,
for people who do not use Python. Archives of equal wheels are equal.
"""

import gzip
import io
import pathlib
import sys
import tarfile
import zipfile

for path in pathlib.Path(sys.argv[1]).glob("gohvd-*-py3-none-manylinux*.whl"):
    version, machine = path.name.split("-")[1], path.stem.partition("manylinux2014_")[2]
    name = f"gohvd-{version}-linux-{machine}"
    with zipfile.ZipFile(path) as wheel, open(path.parent / f"{name}.tar.gz", "wb") as file, gzip.GzipFile(
        "", "wb", 6, file, mtime=0
    ) as compressed, tarfile.open(mode="w", fileobj=compressed) as archive:
        for entry in wheel.infolist():
            top, _, inside = entry.filename.partition("/")
            folder = inside.partition("/")[0]
            if top == "gohvd" and folder in ("bin", "include", "lib") or folder == "licenses":
                member = tarfile.TarInfo(f"{name}/{inside}")
                member.size, member.mode = entry.file_size, entry.external_attr >> 16 & 0o777
                archive.addfile(member, io.BytesIO(wheel.read(entry)))
