//! Hints for a plugin's name written as a scheme (`perl:x.pl`), or a URI that an nbdkit plugin
//! reads.

/// Plugins without an equivalent scheme of this program, with the parameter that takes the text
/// after their name; none if they need several.
const PLUGINS: &[(&str, Option<&str>)] = &[
    ("blkio", Some("driver")),
    ("cc", Some("script")),
    ("cdi", Some("name")),
    ("curl", Some("url")),
    ("gcs", None),
    ("guestfs", None),
    ("libvirt", None),
    ("lua", Some("script")),
    ("ocaml", None),
    ("perl", Some("script")),
    ("ruby", Some("script")),
    ("rust", None),
    ("s3", None),
    ("ssh", None),
    ("tcl", Some("script")),
    ("torrent", Some("torrent")),
    ("vddk", Some("file")),
];

/// URI schemes that the plugin curl reads.
const OF_CURL: &[&str] = &["http", "https", "ftp", "ftps", "sftp", "scp", "tftp"];

/// What to write instead of `scheme:rest`, if it names a plugin or what one reads.
pub(crate) fn instead_of(scheme: &str, rest: &str) -> Option<String> {
    if OF_CURL.contains(&scheme) {
        let text = "nbdkit's plugin curl reads that: write";
        return Some(format!("{text} 'nbdkit:curl?url={}'", value(&format!("{scheme}:{rest}"))));
    }
    let (name, key) = PLUGINS.iter().find(|(name, _)| *name == scheme)?;
    // The name of its file.
    let name = if *name == "s3" { "S3" } else { name };
    // A question mark in a URI belongs to the URI.
    let own = rest.contains("://");
    let (operand, options) = rest.split_once('?').filter(|_| !own).unwrap_or((rest, ""));
    let more = if options.is_empty() { String::new() } else { format!("&{options}") };
    let written = match key {
        Some(key) if !operand.is_empty() => format!("nbdkit:{name}?{key}={}{more}", value(operand)),
        Some(key) => format!("nbdkit:{name}?{key}=…{more}"),
        None => match uri(operand) {
            Some((user, host, path)) if name == "ssh" => {
                let user = user.map(|user| format!("&user={}", value(user))).unwrap_or_default();
                format!("nbdkit:ssh?host={}{user}&path={}{more}", value(host), value(path))
            }
            _ => format!("nbdkit:{name}?KEY=VALUE&…"),
        },
    };
    Some(format!("for nbdkit's plugin {name} write '{written}'"))
}

/// User, host and path of `//USER@HOST/PATH`.
fn uri(text: &str) -> Option<(Option<&str>, &str, &str)> {
    let text = text.strip_prefix("//")?;
    let (place, path) = text.split_at(text.find('/')?);
    Some(match place.split_once('@') {
        Some((user, host)) => (Some(user), host, path),
        None => (None, place, path),
    })
}

/// A value as written after a question mark.
fn value(text: &str) -> String {
    text.replace('%', "%25").replace('&', "%26").replace('\'', "%27")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_plugins_and_what_they_read_lead_to_them() {
        for (typed, written) in [
            ("perl:/a/b.pl?size=1M", "nbdkit:perl?script=/a/b.pl&size=1M"),
            ("perl:", "nbdkit:perl?script=…"),
            ("curl:https://h/x?y", "nbdkit:curl?url=https://h/x?y"),
            ("https://h/d.img?a=1&b=2", "nbdkit:curl?url=https://h/d.img?a=1%26b=2"),
            ("ssh://me@host/d.img", "nbdkit:ssh?host=host&user=me&path=/d.img"),
            ("ssh:host", "nbdkit:ssh?KEY=VALUE&…"),
            ("vddk:disk.vmdk", "nbdkit:vddk?file=disk.vmdk"),
            ("s3:x", "nbdkit:S3?KEY=VALUE&…"),
        ] {
            let (scheme, rest) = typed.split_once(':').unwrap_or_default();
            let said = instead_of(scheme, rest).unwrap_or_default();
            assert!(said.contains(&format!("'{written}")), "{typed}: {said}");
        }
        assert_eq!(instead_of("tape", "1"), None);
    }
}
