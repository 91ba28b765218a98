"""A certificate authority for tests, made with the program openssl."""

import shutil
import subprocess
from pathlib import Path

OPENSSL = shutil.which("openssl")

_CONFIG = """
[ca]
default_ca = here
[here]
database = {folder}/index.txt
new_certs_dir = {folder}
rand_serial = yes
default_md = sha256
policy = any
unique_subject = no
[any]
commonName = supplied
[req]
distinguished_name = nothing
[nothing]
[authority]
basicConstraints = critical,CA:true
keyUsage = critical,keyCertSign
subjectKeyIdentifier = hash
[server]
basicConstraints = CA:false
subjectAltName = IP:127.0.0.1,DNS:gpu.lan
extendedKeyUsage = serverAuth
authorityKeyIdentifier = keyid
"""
PAST = ("20200101000000Z", "20200102000000Z")
NOW = ("20200101000000Z", "20991231235959Z")


class Authority:
    """``cert``: its own certificate, which clients trust."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._config = folder / "openssl.cnf"
        self._config.write_text(_CONFIG.format(folder=folder))
        (folder / "index.txt").touch()
        self._key = self.key("authority")
        self.cert = self._sign("authority", self._key, NOW, "authority", ("-selfsign", "-keyfile", self._key))

    def _run(self, *arguments: object) -> None:
        subprocess.run([OPENSSL, *map(str, arguments)], check=True, capture_output=True, timeout=300)

    def key(self, name: str) -> Path:
        """The file of a new private key."""
        file = self._folder / f"{name}.key"
        self._run("genpkey", "-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-256", "-out", file)
        return file

    def locked(self, key: Path) -> Path:
        """The same key behind a password."""
        file = key.with_suffix(".locked")
        self._run("pkey", "-in", key, "-aes256", "-passout", "pass:secret", "-out", file)
        return file

    def server(self, name: str, key: Path, dates: tuple[str, str] = NOW) -> Path:
        """A certificate of a server at 127.0.0.1 and gpu.lan."""
        return self._sign(name, key, dates, "server", ("-cert", self.cert, "-keyfile", self._key))

    def _sign(self, name: str, key: Path, dates: tuple[str, str], kind: str, by: tuple[object, ...]) -> Path:
        request, cert = self._folder / f"{name}.csr", self._folder / f"{name}.pem"
        self._run("req", "-new", "-config", self._config, "-key", key, "-subj", f"/CN={name}", "-out", request)
        self._run(
            "ca", "-batch", "-notext", "-config", self._config, "-in", request, "-out", cert, "-extensions", kind,
            "-startdate", dates[0], "-enddate", dates[1], *by,
        )  # fmt: skip
        return cert
