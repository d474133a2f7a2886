"""TLS certificates of the server, for HTTP and gRPC; they are reloaded without closing connections."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hasten.core.errors import PlanError


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Certificate and key of the server and, if clients need certificates, those that sign them; all as PEM."""

    cert: Path
    key: Path
    client_ca: Path | None = None

    @classmethod
    def of(cls, cert: Path | None, key: Path | None, client_ca: Path | None) -> TlsFiles | None:
        """Return the files, or None without TLS; raise if one is missing."""
        if cert is None and key is None and client_ca is None:
            return None
        if cert is None or key is None:
            raise PlanError("TLS needs a certificate and its key", hint="--tls-cert FILE --tls-key FILE")
        for option, file in (("--tls-cert", cert), ("--tls-key", key), ("--tls-client-ca", client_ca)):
            if file is not None and not file.is_file():
                raise PlanError(f"{option}: there is no file {file}")
        return cls(cert, key, client_ca)

    def load(self, context: ssl.SSLContext) -> None:
        """Load the certificate and its key for new connections."""
        try:
            context.load_cert_chain(self.cert, self.key, password="")  # never prompt for a password
        except OSError as error:  # includes ssl.SSLError
            reason = f"cannot load {self.cert} and {self.key}: {error.strerror or error}"
            hint = "use PEM files, with the key of that certificate and without a password"
            raise PlanError(reason, hint=hint) from error

    def context(self) -> ssl.SSLContext:
        """Return a new context with these files."""
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self.load(context)
        if self.client_ca is not None:
            try:
                context.load_verify_locations(self.client_ca)
            except OSError as error:
                reason = f"cannot load {self.client_ca}: {error.strerror or error}"
                raise PlanError(reason, hint="--tls-client-ca takes a PEM file of certificates") from error
            context.verify_mode = ssl.CERT_REQUIRED
        return context


class Tls:
    """The TLS context of HTTP, and the credentials of gRPC, both of which change with `reload`."""

    def __init__(self, files: TlsFiles) -> None:
        self._files = files
        self.context = files.context()
        self._pems = self._read()
        # The certificate and key that gRPC has.
        self._grpc_pems = self._pems

    def reload(self) -> None:
        """Load changed certificates for new connections, or raise and keep the old ones.

        Certificates that sign those of clients stay: a context can only add to them.
        """
        self._files.context()
        pems = self._read()
        self._files.load(self.context)
        self._pems = pems

    def grpc_credentials(self) -> Any:
        """Return the credentials of a gRPC server, which ask for the present certificate at each connection."""
        import grpc

        client_ca = self._files.client_ca
        roots = None if client_ca is None else client_ca.read_bytes()

        def configuration() -> Any:
            return grpc.ssl_server_certificate_configuration([self._pems], roots)

        def changed() -> Any:
            if self._grpc_pems is self._pems:
                return None
            self._grpc_pems = self._pems
            return configuration()

        return grpc.dynamic_ssl_server_credentials(configuration(), changed, client_ca is not None)

    def _read(self) -> tuple[bytes, bytes]:
        """Return key and certificate."""
        return self._files.key.read_bytes(), self._files.cert.read_bytes()
