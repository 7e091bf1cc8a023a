//! TLS credentials as QEMU's programs take them: `--object tls-creds-x509,…` and `tls-creds-psk`.

use serde_json::{Map, Value as Json};

use crate::qemu_image::encoded;
use crate::qemu_storage_daemon::{parameters, text};

/// Credentials, as an object with a name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CredentialsObject {
    id: String,
    is_server: bool,
    kind: CredentialsKind,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum CredentialsKind {
    /// A directory with certificates, and whether the peer must have one.
    Certificates { dir: String, verify: bool },
    /// A file with keys, and the name of the client.
    Keys { file: String, user: String },
}

/// The name of the user of keys that a client has by default.
const USER: &str = "qemu";

impl CredentialsObject {
    /// The object of an option.
    ///
    /// # Errors
    /// What is missing, or not supported, by name.
    pub fn parse(given: &str) -> Result<CredentialsObject, String> {
        let object = parameters(given, "qom-type")?;
        let one = |name: &str| text(&object, name).to_string();
        let kind = one("qom-type");
        let known: &[&str] = match kind.as_str() {
            "tls-creds-x509" => &["id", "endpoint", "dir", "verify-peer", "priority"],
            "tls-creds-psk" => &["id", "endpoint", "dir", "username", "verify-peer", "priority"],
            other => return Err(format!("--object {other} is not supported")),
        };
        let is_known = |name: &&String| *name == "qom-type" || known.contains(&name.as_str());
        if let Some(name) = object.keys().find(|name| !is_known(name)) {
            return Err(format!("--object {kind}: '{name}' is not supported"));
        }
        for name in ["id", "dir"] {
            if one(name).is_empty() {
                return Err(format!("--object {kind}: '{name}' is missing"));
            }
        }
        let is_server = match one("endpoint").as_str() {
            "server" => true,
            "client" | "" => false,
            other => return Err(format!("--object {kind}: unknown endpoint '{other}'")),
        };
        let dir = one("dir");
        let kind = match kind.as_str() {
            "tls-creds-x509" => {
                CredentialsKind::Certificates { dir, verify: is_on(&object, "verify-peer") }
            }
            _ => {
                let user = Some(one("username")).filter(|name| !name.is_empty());
                let user = user.unwrap_or_else(|| USER.to_string());
                CredentialsKind::Keys { file: format!("{dir}/keys.psk"), user }
            }
        };
        Ok(CredentialsObject { id: one("id"), is_server, kind })
    }

    /// The credentials of this name, of a server or of a client.
    ///
    /// # Errors
    /// If there are none, or those of the other side.
    pub fn find<'a>(
        all: &'a [CredentialsObject],
        id: &str,
        is_server: bool,
    ) -> Result<&'a CredentialsObject, String> {
        let found = all.iter().rev().find(|one| one.id == id);
        let found = found.ok_or_else(|| format!("No TLS credentials with id '{id}'"))?;
        if found.is_server != is_server {
            let side = if is_server { "server" } else { "client" };
            return Err(format!("Expecting TLS credentials with a {side} endpoint"));
        }
        Ok(found)
    }

    /// The options of `blockhaul serve`.
    pub fn serve_options(&self) -> Vec<String> {
        let mut all = vec!["--tls=require".to_string()];
        match &self.kind {
            CredentialsKind::Certificates { dir, verify } => {
                all.push(format!("--tls-certificates={dir}"));
                all.extend(verify.then(|| "--tls-verify-peer".to_string()));
            }
            CredentialsKind::Keys { file, .. } => all.push(format!("--tls-psk={file}")),
        }
        all
    }

    /// The URI of an export with this protection, from that without. `host`: the name that the
    /// certificate of the server must have.
    pub fn uri(&self, uri: &str, host: &str) -> String {
        let uri = uri.replacen("nbd", "nbds", 1);
        let mut all = Vec::new();
        let uri = match &self.kind {
            CredentialsKind::Certificates { dir, verify } => {
                all.push(format!("tls-certificates={}", encoded(dir)));
                all.extend((!verify).then(|| "tls-verify-peer=0".to_string()));
                uri
            }
            CredentialsKind::Keys { file, user } => {
                all.push(format!("tls-psk-file={}", encoded(file)));
                uri.replacen("://", &format!("://{}@", encoded(user)), 1)
            }
        };
        if !host.is_empty() {
            all.push(format!("tls-hostname={}", encoded(host)));
        }
        let separator = if uri.contains('?') { '&' } else { '?' };
        format!("{uri}{separator}{}", all.join("&"))
    }
}

/// Whether a switch is on, which it is by default.
fn is_on(object: &Map<String, Json>, name: &str) -> bool {
    match object.get(name) {
        None => true,
        Some(Json::Bool(value)) => *value,
        Some(value) => !["off", "no", "false"].iter().any(|off| value == off),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn objects_become_options_and_uris() {
        let server = "tls-creds-x509,dir=/c,endpoint=server,id=t,verify-peer=on";
        let client = "tls-creds-psk,dir=/k,username=me,endpoint=client,id=u";
        let all = [server, client].map(|text| CredentialsObject::parse(text).unwrap());
        let found = CredentialsObject::find(&all, "t", true).unwrap();
        let wanted = ["--tls=require", "--tls-certificates=/c", "--tls-verify-peer"];
        assert_eq!(found.serve_options(), wanted);
        assert!(CredentialsObject::find(&all, "t", false).unwrap_err().contains("client endpoint"));
        assert!(CredentialsObject::find(&all, "x", true).unwrap_err().contains("'x'"));
        let found = CredentialsObject::find(&all, "u", false).unwrap();
        assert_eq!(
            found.uri("nbd+unix:///e?socket=/s", ""),
            "nbds+unix://me@/e?socket=/s&tls-psk-file=/k/keys.psk"
        );
        let client = CredentialsObject::parse("tls-creds-x509,dir=/c,id=c").unwrap();
        assert_eq!(client.uri("nbd://h:1/", "n"), "nbds://h:1/?tls-certificates=/c&tls-hostname=n");
        let open = CredentialsObject::parse("tls-creds-x509,dir=/c,id=c,verify-peer=off").unwrap();
        assert!(open.uri("nbd://h:1/", "").ends_with("tls-verify-peer=0"));
    }

    #[test]
    fn other_objects_are_refused() {
        for (text, why) in [
            ("secret,id=x", "secret"),
            ("tls-creds-x509,id=x", "'dir' is missing"),
            ("tls-creds-x509,dir=x", "'id' is missing"),
            ("tls-creds-x509,dir=x,id=x,passwordid=p", "'passwordid'"),
            ("tls-creds-psk,dir=x,id=x,endpoint=both", "'both'"),
        ] {
            let said = CredentialsObject::parse(text).unwrap_err();
            assert!(said.contains(why), "{text}: {said}");
        }
    }
}
