//! Users and passwords of registries, in the files of skopeo, podman and docker (containers-auth.json(5)).

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use blockhaul_block::{Error, Kind, Result};
use serde_json::Value;

use super::credential_helper::ask;
use super::reference::ImageReference;
use crate::files::read_text;

/// Largest file with credentials.
const FILE_MAX: u64 = 1 << 20;
/// The name of docker.io in files of docker.
const DOCKER: &str = "https://index.docker.io/v1/";
const DOCKER_HOST: &str = "docker.io";

/// Credentials of a registry. They are in no message.
pub(super) enum RegistryLogin {
    /// A user and a password.
    Password(String, String),
    /// A token for tokens.
    Identity(String),
}

/// The credentials of an image in the files of this user, if there are any. Blocks.
///
/// # Errors
/// A file is damaged.
pub(super) fn find(image: &ImageReference) -> Result<Option<RegistryLogin>> {
    let variable = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty());
    if let Some(file) = variable("REGISTRY_AUTH_FILE") {
        return of_file(Path::new(&file), image);
    }
    let home = variable("HOME").map(PathBuf::from);
    let runtime = match variable("XDG_RUNTIME_DIR") {
        Some(folder) => PathBuf::from(folder).join("containers"),
        None => format!("/run/containers/{}", rustix::process::getuid().as_raw()).into(),
    };
    let docker = variable("DOCKER_CONFIG").map(PathBuf::from);
    let docker = docker.or_else(|| home.as_ref().map(|home| home.join(".docker")));
    let files = [
        Some(runtime.join("auth.json")),
        home.as_ref().map(|home| home.join(".config/containers/auth.json")),
        docker.map(|folder| folder.join("config.json")),
    ];
    for file in files.into_iter().flatten().filter(|file| file.exists()) {
        if let Some(found) = of_file(&file, image)? {
            return Ok(Some(found));
        }
    }
    Ok(None)
}

fn of_file(file: &Path, image: &ImageReference) -> Result<Option<RegistryLogin>> {
    let text = read_text(file, FILE_MAX)?;
    let entry = of_text(&text, image);
    let login = entry.and_then(|entry| match entry {
        Some(LoginEntry::Helper { name, server }) => ask(&name, &server),
        Some(LoginEntry::Login(login)) => Ok(Some(login)),
        None => Ok(None),
    });
    login.map_err(|why| {
        let text = format!("{}: {why}", file.display());
        let remedy =
            "log in again (skopeo login, podman login), or give a user and password-file=FILE";
        Error::new(Kind::Invalid, text).with_remedy(remedy)
    })
}

/// What a file has for an image.
enum LoginEntry {
    Login(RegistryLogin),
    /// A program has the credentials, by the name of a server.
    Helper {
        name: String,
        server: String,
    },
}

/// The entry of an image in the text of a file, or what is wrong with it.
fn of_text(text: &str, image: &ImageReference) -> Result<Option<LoginEntry>, String> {
    // Texts of the parser could show secrets.
    let all: HashMap<String, Value> =
        serde_json::from_str(text).map_err(|_| "no JSON object".to_owned())?;
    // The helper of one registry counts before all other entries.
    if let Some(helpers) = all.get("credHelpers").and_then(Value::as_object) {
        let servers = own_keys(image);
        let found = servers.iter().find_map(|server| helpers.get(server));
        if let Some(name) = found {
            let name = name.as_str().ok_or("an entry of credHelpers is damaged")?.to_owned();
            // The helpers of docker know its own registry by this name alone.
            let is_docker = image.registry == DOCKER_HOST;
            let server = if is_docker { DOCKER } else { image.registry.as_str() };
            return Ok(Some(LoginEntry::Helper { name, server: server.to_owned() }));
        }
    }
    let auths = all.get("auths").and_then(Value::as_object);
    let found =
        auths.and_then(|auths| keys(image).into_iter().find_map(|key| auths.get_key_value(&key)));
    let Some((server, found)) = found else { return Ok(None) };
    let member =
        |name: &str| found.get(name).and_then(Value::as_str).filter(|text| !text.is_empty());
    if let Some(token) = member("identitytoken") {
        return Ok(Some(LoginEntry::Login(RegistryLogin::Identity(token.to_owned()))));
    }
    if let Some(auth) = member("auth") {
        let login = password(auth).ok_or("an entry of auths is damaged")?;
        return Ok(Some(LoginEntry::Login(login)));
    }
    // An empty entry says that the store has the credentials.
    match all.get("credsStore") {
        None => Ok(None),
        Some(Value::String(name)) => {
            Ok(Some(LoginEntry::Helper { name: name.clone(), server: server.clone() }))
        }
        Some(_) => Err("credsStore is damaged".to_owned()),
    }
}

/// The keys that an entry for an image may have, the longest first.
fn keys(image: &ImageReference) -> Vec<String> {
    let ImageReference { registry, name, .. } = image;
    let mut keys = Vec::new();
    let mut path = name.as_str();
    loop {
        keys.push(format!("{registry}/{path}"));
        let Some((shorter, _)) = path.rsplit_once('/') else { break };
        path = shorter;
    }
    keys.extend(own_keys(image));
    keys
}

/// The keys that an entry for a registry may have.
fn own_keys(image: &ImageReference) -> Vec<String> {
    let registry = &image.registry;
    let mut keys =
        vec![registry.clone(), format!("https://{registry}"), format!("https://{registry}/v2/")];
    if registry == DOCKER_HOST {
        keys.push(DOCKER.to_owned());
    }
    keys
}

fn password(auth: &str) -> Option<RegistryLogin> {
    let bytes = openssl::base64::decode_block(auth).ok()?;
    let text = String::from_utf8(bytes).ok()?;
    let (user, password) = text.split_once(':')?;
    // Padding of some versions of docker.
    Some(RegistryLogin::Password(user.to_owned(), password.trim_end_matches('\0').to_owned()))
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that fails")]
mod tests {
    use super::*;

    fn found(text: &str, image: &str) -> Result<Option<String>, String> {
        let entry = of_text(text, &ImageReference::parse(image).unwrap())?;
        Ok(entry.map(|entry| match entry {
            LoginEntry::Login(RegistryLogin::Password(user, password)) => {
                format!("{user}/{password}")
            }
            LoginEntry::Login(RegistryLogin::Identity(token)) => token,
            LoginEntry::Helper { name, server } => format!("{name} for {server}"),
        }))
    }

    #[test]
    fn the_most_specific_entry_counts() {
        let text = r#"{"auths":{"h:5000":{"auth":"dTpw"},"h:5000/a":{"auth":"dTI6cHc6Mg=="},
            "https://index.docker.io/v1/":{"auth":"ZDpk"},"i":{"auth":"dTpw","identitytoken":"t"},"e":{}}}"#;
        for (image, expected) in [
            ("h:5000/b:1", Some("u/p")),
            ("h:5000/a/b", Some("u2/pw:2")),
            ("h:5000/a", Some("u2/pw:2")),
            ("h:5000/ab", Some("u/p")),
            ("docker.io/x", Some("d/d")),
            ("i/x", Some("t")),
            ("e/x", None),
            ("h/a", None),
        ] {
            assert_eq!(found(text, image).unwrap().as_deref(), expected, "{image}");
        }
    }

    #[test]
    fn helpers_of_a_registry_count_first_and_a_store_behind_entries() {
        let text = r#"{"auths":{"h":{"auth":"dTpw"},"s:1/a":{},"https://index.docker.io/v1/":{},"i":{"auth":"dTpw"}},
            "credHelpers":{"h":"pass","docker.io":"hub"},"credsStore":"store"}"#;
        for (image, expected) in [
            ("h/a:1", Some("pass for h")),
            ("s:1/a/b", Some("store for s:1/a")),
            ("docker.io/x", Some("hub for https://index.docker.io/v1/")),
            ("i/x", Some("u/p")),
            ("other/x", None),
        ] {
            assert_eq!(found(text, image).unwrap().as_deref(), expected, "{image}");
        }
    }

    #[test]
    fn damaged_files_are_errors_without_secrets() {
        for (text, why) in [
            ("{\"auths\":{\"h\":{\"auth\":\"secret!\"}}}", "damaged"),
            ("{\"auths\":{\"h\":{\"auth\":\"c2VjcmV0\"}}}", "damaged"),
            ("{\"auths\": secret", "no JSON"),
            ("{\"auths\":{\"h\":{}},\"credsStore\":[\"secret\"]}", "damaged"),
            ("{\"credHelpers\":{\"h\":{\"secret\":1}}}", "damaged"),
        ] {
            let said = found(text, "h/a").unwrap_err();
            assert!(said.contains(why) && !said.contains("secret"), "{said}");
        }
        assert_eq!(found("{\"credsStore\":\"pass\"}", "h/a").unwrap(), None);
        assert_eq!(found("{}", "h/a").unwrap(), None);
    }
}
