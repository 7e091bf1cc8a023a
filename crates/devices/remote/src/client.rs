//! Connections to servers: TLS, proxies of the environment, time limits.

use std::path::Path;
use std::time::Duration;

use blockhaul_block::{Error, Kind, Result};
use reqwest::redirect::Policy;
use reqwest::{Certificate, Client};

use crate::RemoteOptions;
use crate::files::read_text;

/// Time after which an idle connection is closed: servers and balancers close theirs after 60 s or later.
const IDLE_MAX: Duration = Duration::from_secs(30);
/// Bytes of a request that have the time of a response: a part of an upload.
pub(crate) const SENT_PIECE: usize = 8 << 20;
/// Largest file with certificates: a few times those of a system.
const AUTHORITIES_MAX: u64 = 4 << 20;

/// A client with at most `connections` idle connections for each host. It trusts the authorities in the file
/// `authority`, or those of the system, and does not follow redirects. Reads files: it blocks.
///
/// # Errors
/// The file cannot be read, or holds no certificate.
pub(crate) fn client(
    options: RemoteOptions,
    authority: Option<&Path>,
    connections: usize,
) -> Result<Client> {
    let mut builder = Client::builder()
        .user_agent(concat!("blockhaul/", env!("CARGO_PKG_VERSION")))
        .redirect(Policy::none())
        .retry(reqwest::retry::never())
        .http1_only()
        .tcp_nodelay(true)
        .pool_idle_timeout(IDLE_MAX)
        .pool_max_idle_per_host(connections);
    if !options.connect_timeout.is_zero() {
        builder = builder.connect_timeout(options.connect_timeout);
    }
    if let Some(file) = authority {
        builder = builder.tls_certs_only(authorities(file)?);
    }
    builder.build().map_err(|error| {
        let text = format!("cannot prepare connections: {}", crate::failure::chain(&error));
        Error::new(Kind::Invalid, text)
    })
}

/// The certificates in a file.
fn authorities(file: &Path) -> Result<Vec<Certificate>> {
    let shown = file.display();
    let text = read_text(file, AUTHORITIES_MAX)?;
    let found = Certificate::from_pem_bundle(text.as_bytes()).unwrap_or_default();
    if found.is_empty() {
        let text = format!("{shown} holds no certificate in PEM");
        let remedy = "name the file with the certificate of the authority in ca=FILE";
        return Err(Error::new(Kind::Invalid, text).with_remedy(remedy));
    }
    Ok(found)
}
