//! Hints for a plugin's name written as a scheme (`perl:x.pl`), a URI that an nbdkit plugin reads, and a
//! plugin that is not installed.

/// Plugins without an equivalent scheme of this program, with the required parameters and Debian's package
/// (empty: none has the plugin). The text after the name is the first parameter, if there is one.
const PLUGINS: &[(&str, &[&str], &str)] = &[
    ("blkio", &["driver"], "nbdkit"),
    ("cc", &["script"], "nbdkit"),
    ("cdi", &["name"], "nbdkit"),
    ("curl", &["url"], "nbdkit"),
    ("floppy", &["dir"], "nbdkit"),
    ("gcs", &[], "nbdkit"),
    ("guestfs", &[], "nbdkit-plugin-guestfs"),
    ("iso", &["dir"], "nbdkit"),
    ("libvirt", &[], "nbdkit-plugin-libvirt"),
    ("linuxdisk", &["dir"], "nbdkit"),
    ("lua", &["script"], "nbdkit-plugin-lua"),
    ("ocaml", &[], ""),
    ("ondemand", &["dir", "size"], "nbdkit"),
    ("perl", &["script"], "nbdkit-plugin-perl"),
    ("ruby", &["script"], "nbdkit-plugin-ruby"),
    ("rust", &[], ""),
    ("s3", &[], "nbdkit"),
    ("ssh", &[], "nbdkit"),
    ("tcl", &["script"], "nbdkit-plugin-tcl"),
    ("tmpdisk", &["size"], "nbdkit"),
    ("torrent", &["torrent"], "nbdkit"),
    ("vddk", &["file"], ""),
];

/// Debian's package with a plugin.
pub(crate) fn package(plugin: &str) -> Option<&'static str> {
    let row = PLUGINS.iter().find(|(name, ..)| name.eq_ignore_ascii_case(plugin));
    row.map(|(.., package)| *package).filter(|package| !package.is_empty())
}

/// URI schemes that the plugin curl reads.
const OF_CURL: &[&str] = &["http", "https", "ftp", "ftps", "sftp", "scp", "tftp"];

/// What to write instead of `scheme:rest`, if it names a plugin or what one reads.
pub(crate) fn instead_of(scheme: &str, rest: &str) -> Option<String> {
    if OF_CURL.contains(&scheme) {
        let text = "nbdkit's plugin curl reads that: write";
        return Some(format!("{text} 'nbdkit:curl?url={}'", value(&format!("{scheme}:{rest}"))));
    }
    let (name, params, _) = PLUGINS.iter().find(|(name, ..)| *name == scheme)?;
    // The name of its file.
    let name = if *name == "s3" { "S3" } else { name };
    // A question mark in a URI belongs to the URI.
    let own = rest.contains("://");
    let (operand, options) = rest.split_once('?').filter(|_| !own).unwrap_or((rest, ""));
    let more = if options.is_empty() { String::new() } else { format!("&{options}") };
    let written = match params.split_first() {
        Some((first, others)) => {
            let operand = if operand.is_empty() { "…".into() } else { value(operand) };
            let missing = others.iter().filter(|_| options.is_empty());
            let missing = missing.map(|name| format!("&{name}=…")).collect::<String>();
            format!("nbdkit:{name}?{first}={operand}{missing}{more}")
        }
        None => match uri(operand) {
            Some((user, host, path)) if name == "ssh" => {
                let user = user.map(|user| format!("&user={}", value(user))).unwrap_or_default();
                format!("nbdkit:ssh?host={}{user}&path={}{more}", value(host), value(path))
            }
            _ => format!("nbdkit:{name}?KEY=VALUE&…"),
        },
    };
    let package = package(name).map(|package| format!(" (Debian's package {package})"));
    Some(format!("for nbdkit's plugin {name}{} write '{written}'", package.unwrap_or_default()))
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
            ("floppy:a b?size=1G", "nbdkit:floppy?dir=a b&size=1G"),
            ("ondemand:", "nbdkit:ondemand?dir=…&size=…"),
            ("ondemand:/d?size=1M", "nbdkit:ondemand?dir=/d&size=1M"),
        ] {
            let (scheme, rest) = typed.split_once(':').unwrap_or_default();
            let said = instead_of(scheme, rest).unwrap_or_default();
            assert!(said.contains(&format!("'{written}")), "{typed}: {said}");
        }
        assert_eq!(instead_of("tape", "1"), None);
        let packages = ["S3", "perl", "vddk", "tape"].map(package);
        assert_eq!(packages, [Some("nbdkit"), Some("nbdkit-plugin-perl"), None, None]);
    }
}
