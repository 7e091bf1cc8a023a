//! Texts and paths that Windows writes.

/// A text of 16-bit units, up to the first zero.
pub(crate) fn utf16(bytes: &[u8], unit: fn([u8; 2]) -> u16) -> String {
    let (pairs, _) = bytes.as_chunks::<2>();
    let units: Vec<u16> =
        pairs.iter().map(|pair| unit(*pair)).take_while(|&unit| unit != 0).collect();
    String::from_utf16_lossy(&units)
}

/// A path with slashes. One that begins at a drive becomes its last part: the drive is not here.
pub(crate) fn path(text: &str) -> String {
    let path = text.replace('\\', "/");
    let has_drive = path.starts_with('/') || path.get(1..2) == Some(":");
    if has_drive {
        last(&path).unwrap_or_default().to_string()
    } else {
        path.strip_prefix("./").unwrap_or(&path).to_string()
    }
}

/// The path of a parent in a descriptor, which a program on Linux or Windows wrote: as it is,
/// unless it begins at a drive.
pub(crate) fn parent_of_vmdk(text: &str) -> String {
    if text.starts_with('/') { text.to_string() } else { path(text) }
}

/// The last part of a path.
pub(crate) fn last(path: &str) -> Option<&str> {
    path.rsplit('/').next().filter(|name| !name.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_of_windows_are_relative_to_the_image() {
        assert_eq!(path(r".\base.vhd"), "base.vhd");
        assert_eq!(path(r"..\disks\base.vhd"), "../disks/base.vhd");
        assert_eq!(path(r"C:\disks\base.vhd"), "base.vhd");
        assert_eq!(path(r"\\?\Volume{1}\base.vhd"), "base.vhd");
        assert_eq!(utf16(b"a\0\xe4\0\0\0b\0", u16::from_le_bytes), "aä");
    }
}
