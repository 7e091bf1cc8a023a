//! Numbers of remote files, by which a copy recognizes that both sides are one file.

use blockhaul_block::FileId;
use blockhaul_catalog::{StorageId, StorageIds};
use reqwest::Url;

/// The number of what is at this address. The upper bit is set: no file has such a number.
pub(crate) fn identity_of(address: &str) -> FileId {
    let digest = openssl::sha::sha256(address.as_bytes());
    let number = |bytes: &[u8]| bytes.iter().fold(0, |all, byte| all << 8 | u64::from(*byte));
    (number(&digest[..8]) | 1 << 63, number(&digest[8..16]) | 1)
}

/// The number of the file at a URL, however its path is encoded and whoever reads it.
pub(crate) fn identity_of_url(url: &Url) -> FileId {
    let host = url.host_str().unwrap_or_default();
    let port = url.port_or_known_default().unwrap_or_default();
    let path = blockhaul_catalog::percent_decode(url.path());
    let path = path.unwrap_or_else(|_| url.path().to_owned());
    let query = url.query().unwrap_or_default();
    identity_of(&format!("{}://{host}:{port}{path}?{query}", url.scheme()))
}

/// The claims on a remote file.
pub(crate) fn storage_ids(identity: FileId) -> StorageIds {
    StorageIds { same: vec![StorageId::File(identity)], below: Vec::new() }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that fails")]
mod tests {
    use super::*;

    #[test]
    fn a_file_has_one_number_however_its_url_is_written() {
        let number = |url: &str| identity_of_url(&Url::parse(url).unwrap());
        let usual = number("http://host/a%20b/c");
        for same in
            ["http://HOST:80/a b/c", "http://u:p@host/x/../a%20b/%63", "http://host/a%20b/c#x"]
        {
            assert_eq!(number(same), usual, "{same}");
        }
        for other in ["https://host/a%20b/c", "http://host:81/a b/c", "http://host/a b/c?v=1"] {
            assert_ne!(number(other), usual, "{other}");
        }
        assert_ne!(number("http://h/%ff"), number("http://h/%fe"));
    }
}
