"""TLS: the context that connections are made with, from files that are checked at the start."""

from __future__ import annotations

import ssl

from twostep.contracts.errors import UsageError


def tls_context(
    certfile: str, keyfile: str | None = None, ca_certs: str | None = None
) -> ssl.SSLContext:
    """TLS 1.2 and later with a certificate; with ``ca_certs`` clients need one of theirs, too.

    ``keyfile`` None: the key lies in ``certfile``. Raises UsageError for a file that does not fit.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    _check_readable(certfile, "--ssl-certfile")
    if keyfile is not None:
        _check_readable(keyfile, "--ssl-keyfile")
    try:
        context.load_cert_chain(certfile, keyfile, _no_password)
    except (OSError, ValueError) as error:
        files = certfile if keyfile is None else f"{certfile}, --ssl-keyfile {keyfile}"
        raise UsageError(f"--ssl-certfile {files}: {_reason(error)}") from None
    if ca_certs is not None:
        _check_readable(ca_certs, "--ssl-ca-certs")
        try:
            context.load_verify_locations(ca_certs)
        except (OSError, ValueError) as error:
            raise UsageError(f"--ssl-ca-certs {ca_certs}: {_reason(error)}") from None
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _no_password() -> str:
    """OpenSSL would ask on the terminal, where nobody may be."""
    raise ValueError("the key has a password; give one without")


def _check_readable(name: str, flag: str) -> None:
    try:
        with open(name, "rb"):
            pass
    except OSError as error:
        raise UsageError(f"cannot read {flag} {name}: {error.strerror or error}") from None


def _reason(error: Exception) -> str:
    """OpenSSL's words without its numbers; it names no file."""
    if isinstance(error, ssl.SSLError):
        reason = (error.reason or "").lower().replace("_", " ")
        return reason or "this is no certificate and key in PEM form"
    return str(error)
