//! Descriptions of devices: the file or storage that they name, and their forms without secrets.

use std::borrow::Cow;
use std::path::{Path, PathBuf};

use blockhaul_catalog::{DeviceSpec, without_login_password};
use blockhaul_wire::uri::{HttpUri, Transport, Uri, is_http};

/// Whether two descriptions name the same storage.
pub fn same(one: &DeviceSpec, other: &DeviceSpec) -> bool {
    if let (Some(one), Some(other)) = (path_of(one), path_of(other)) {
        return blockhaul_backends::identity(&one)
            .is_some_and(|found| Some(found) == blockhaul_backends::identity(&other));
    }
    match (one, other) {
        (DeviceSpec::Scheme { .. }, DeviceSpec::Scheme { .. }) => {
            let one = one.to_string();
            let other = other.to_string();
            if is_http(&one) || is_http(&other) {
                let uris = (HttpUri::parse(&one), HttpUri::parse(&other));
                return matches!(uris, (Ok(one), Ok(other))
                    if (&one.transport, &one.request.target, &one.export)
                        == (&other.transport, &other.request.target, &other.export));
            }
            let uris = (Uri::parse(&one), Uri::parse(&other));
            matches!(uris, (Ok(one), Ok(other)) if same_export(&one, &other))
        }
        _ => false,
    }
}

/// The message that source and target are the same storage.
pub fn same_storage(source: &DeviceSpec, target: &DeviceSpec) -> String {
    let [source, target] = [source, target].map(DeviceSpec::to_string);
    let [source, target] = [&source, &target].map(|side| without_passwords(side));
    format!("source {source} and target {target} are the same: choose another target")
}

/// A description for readers that did not write it: without arguments of a command, the user of a URI, and
/// parameters but the socket, of which each may be or contain a secret.
pub fn without_secrets(described: &str) -> String {
    if let Some(words) = described.strip_prefix("[ ") {
        let program = words.split(' ').next().unwrap_or_default();
        return format!("[ {program} … ]");
    }
    let scheme = described.find(':').unwrap_or(described.len());
    let end = described[scheme..].find('?').map_or(described.len(), |at| scheme + at);
    let shown = &described[..end];
    let parameters = described[end..].strip_prefix('?').unwrap_or_default();
    let socket = parameters.split('&').find(|parameter| parameter.starts_with("socket="));
    let socket = socket.map_or_else(String::new, |socket| format!("?{socket}"));
    let Some(authority) = shown.find("://").map(|at| at + "://".len()) else {
        return shown.to_string();
    };
    let rest = &shown[authority..];
    let host = rest[..rest.find('/').unwrap_or(rest.len())].rfind('@').map_or(0, |at| at + 1);
    format!("{}{}{socket}", &shown[..authority], &rest[host..])
}

/// A word of a command line with `…` for the password of its user and those among its parameters, because messages are
/// logged. Files and descriptors that contain passwords remain.
pub fn without_passwords(word: &str) -> Cow<'_, str> {
    let word = without_login_password(word);
    let Some((named, parameters)) = word.split_once('?') else { return word };
    let shown = |parameter: &str| match parameter.split_once('=') {
        Some((key, value)) if holds_password(key) && !is_elsewhere(value) => format!("{key}=…"),
        _ => parameter.to_string(),
    };
    let parameters: Vec<_> = parameters.split('&').map(shown).collect();
    format!("{named}?{}", parameters.join("&")).into()
}

fn holds_password(key: &str) -> bool {
    let key = key.to_ascii_lowercase();
    let names = ["password", "passphrase", "cookie", "signature", "token"];
    key == "sig" || names.iter().any(|name| key.ends_with(name))
}

/// Whether this is not a password, but where it is: `+FILE`, `-` or `-FD`.
fn is_elsewhere(value: &str) -> bool {
    value.starts_with('+')
        || value.starts_with("%2B")
        || value.starts_with("%2b")
        || value.strip_prefix('-').is_some_and(|rest| rest.bytes().all(|b| b.is_ascii_digit()))
}

/// A description for the user who wrote it: without the parameters of disks that have passwords or signatures
/// among them, because messages are logged.
pub fn shown(described: &str) -> Cow<'_, str> {
    if described.starts_with("vddk:") {
        without_secrets(described).into()
    } else if is_url(described) {
        let ends = ["?", "#", "%3f", "%3F"].iter().filter_map(|end| described.find(end));
        without_secrets(&described[..ends.min().unwrap_or(described.len())]).into()
    } else {
        without_login_password(described)
    }
}

/// Whether a description is that of a file of an HTTP server, or of an image in one.
fn is_url(described: &str) -> bool {
    let is_scheme = |scheme: &str| matches!(scheme, "http" | "https" | "dav" | "davs");
    described
        .split_once("://")
        .is_some_and(|(schemes, _)| schemes.rsplit(':').next().is_some_and(is_scheme))
}

/// The path of a file, if it is one.
pub fn path_of(spec: &DeviceSpec) -> Option<PathBuf> {
    match spec {
        DeviceSpec::Path(path) => Some(path.clone()),
        DeviceSpec::Scheme { scheme, rest } if scheme == blockhaul_backends::PATH_SCHEME => {
            let (path, options) = rest.split_once('?').unwrap_or((rest, ""));
            blockhaul_backends::named_file(path, options)
        }
        _ => None,
    }
}

/// The path of the file that is the device, or that holds its image.
pub fn file_of(spec: &DeviceSpec) -> Option<PathBuf> {
    path_of(&image_of(spec)?)
}

/// The device that holds an image, if the description is that of an image; else the description.
fn image_of(spec: &DeviceSpec) -> Option<DeviceSpec> {
    match spec {
        DeviceSpec::Scheme { scheme, rest } if scheme == IMAGE => {
            let (device, _) = rest.split_once('?').unwrap_or((rest, ""));
            let device = blockhaul_catalog::percent_decode(device).ok()?;
            DeviceSpec::parse(device.as_ref()).ok()
        }
        spec => Some(spec.clone()),
    }
}

/// Whether a description is a URI of an NBD server.
pub(crate) fn is_nbd(spec: &DeviceSpec) -> bool {
    matches!(spec, DeviceSpec::Scheme { .. }) && Uri::parse(&spec.to_string()).is_ok()
}

/// The scheme of images that are created as targets of copies.
const IMAGE: &str = "qcow2";

/// Whether a description is that of an image, which a copy of all of a disk creates.
pub fn is_image(spec: &DeviceSpec) -> bool {
    matches!(spec, DeviceSpec::Scheme { scheme, .. } if scheme == IMAGE)
}

/// The canonical path of a file that need not exist yet.
pub fn full(path: &Path) -> PathBuf {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    let folder = std::fs::canonicalize(folder.unwrap_or(Path::new(".")));
    match (folder, path.file_name()) {
        (Ok(folder), Some(name)) => folder.join(name),
        _ => path.to_path_buf(),
    }
}

/// Whether two descriptions refer to the same place, even if nothing exists there yet.
pub fn same_place(one: &DeviceSpec, other: &DeviceSpec) -> bool {
    let [path, other_path] = [one, other].map(|spec| file_of(spec).map(|path| full(&path)));
    same(one, other) || (path.is_some() && path == other_path)
}

fn same_export(one: &Uri, other: &Uri) -> bool {
    let same_server = match (&one.transport, &other.transport) {
        (Transport::Unix { socket: one }, Transport::Unix { socket: other }) => {
            one == other || same_socket(one, other)
        }
        (Transport::Tcp { host, port }, Transport::Tcp { host: host_2, port: port_2 }) => {
            port == port_2 && host.eq_ignore_ascii_case(host_2)
        }
        (one, other) => one == other,
    };
    same_server && one.export == other.export
}

fn same_socket(one: &[u8], other: &[u8]) -> bool {
    use std::os::unix::ffi::OsStrExt as _;
    let identity =
        |path| blockhaul_backends::identity(Path::new(std::ffi::OsStr::from_bytes(path)));
    identity(one).is_some_and(|found| Some(found) == identity(other))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_may_be_secret_is_left_out() {
        for (described, shown) in [
            ("disk.raw", "disk.raw"),
            ("/a/what?.raw", "/a/what?.raw"),
            ("memory:1G", "memory:1G"),
            ("file:/a?passphrase=x", "file:/a"),
            ("nbds://user:word@host:10809/x?tls-psk-file=k", "nbds://host:10809/x"),
            ("nbd://host/a@b", "nbd://host/a@b"),
            ("nbd+unix:///x?tls-psk-file=k&socket=/s", "nbd+unix:///x?socket=/s"),
            ("[ qemu-nbd --password x ]", "[ qemu-nbd … ]"),
            ("-", "-"),
            ("", ""),
        ] {
            assert_eq!(without_secrets(described), shown, "{described}");
        }
        assert_eq!(shown("vddk:[d] a/b.vmdk?password=x"), "vddk:[d] a/b.vmdk");
        assert_eq!(shown("file:/a?direct=on"), "file:/a?direct=on");
        assert_eq!(shown("https://u@host/a?sig=x"), "https://host/a");
        assert_eq!(shown("qcow2:https://host/a%3fsig=x?names=allow"), "qcow2:https://host/a");
        assert_eq!(shown("ssh://u:x@host/a"), "ssh://u:…@host/a");
        assert_eq!(shown("nbd+https://host/a?project=x"), "nbd+https://host/a?project=x");
    }

    #[test]
    fn passwords_are_left_out_and_the_places_of_passwords_are_not() {
        for (word, shown) in [
            ("vddk:[d] a?user=u&password=x%3D&vm=y", "vddk:[d] a?user=u&password=…&vm=y"),
            ("--layer=luks?passphrase=x", "--layer=luks?passphrase=…"),
            (
                "curl:http://h/?cookie=x&proxy-password=y",
                "curl:http://h/?cookie=…&proxy-password=…",
            ),
            (
                "https://h/a?X-Amz-Date=1&X-Amz-Signature=x&sig=y",
                "https://h/a?X-Amz-Date=1&X-Amz-Signature=…&sig=…",
            ),
            ("kubevirt:https://h/?token-file=f", "kubevirt:https://h/?token-file=f"),
            ("vddk:a?password=-x", "vddk:a?password=…"),
            ("vddk:a?password=-3", "vddk:a?password=-3"),
            ("vddk:a?password=-", "vddk:a?password=-"),
            ("vddk:a?password=%2B/root/p", "vddk:a?password=%2B/root/p"),
            ("/a/what?.raw", "/a/what?.raw"),
            ("password=x", "password=x"),
            ("qcow2:ssh://u:x@h:22/a@b:c", "qcow2:ssh://u:…@h:22/a@b:c"),
            ("nbd://u:x?y@h/a?b=c", "nbd://u:…@h/a?b=c"),
            ("ssh://u@h:22/a@b", "ssh://u@h:22/a@b"),
        ] {
            assert_eq!(without_passwords(word), shown);
        }
    }
}
