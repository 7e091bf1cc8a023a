//! Disks in images of registries.

use std::io::Write as _;
use std::path::Path;
use std::process::Command;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use blockhaul_block::Kind;
use openssl::ssl::SslContext;

use super::http_server::HttpAnswer;
use super::registry_server::{CUT, RegistryServer, digest, send};
use super::tls::{certificate, context};
use super::*;

const TAR: &str = "application/vnd.oci.image.layer.v1.tar";
const CONFIG: &str = "application/vnd.oci.image.config.v1+json";

async fn open_image(spec: &str) -> Result<Stack> {
    let timeout = Duration::from_secs(10);
    let options = RemoteOptions { connect_timeout: timeout, timeout };
    let mut backends = blockhaul_remote::all(options);
    backends.extend(blockhaul_backends::all());
    let registry = Registry { backends, ..Registry::default() };
    registry.open(&DeviceSpec::parse(spec.as_ref())?, Vec::new(), Intent::READ).await
}

/// The bytes of the disk, its description, and the name of its version.
fn image(spec: String) -> Result<(Vec<u8>, String, String)> {
    on_a_worker(move || async move {
        let stack = open_image(&spec).await?;
        let facts = stack.device().facts();
        let version = facts.version.as_deref().unwrap_or_default().to_owned();
        let bytes = read_all(&stack).await?;
        blockhaul_io::offload(move || drop(stack)).await.unwrap();
        Ok((bytes, facts.description.clone(), version))
    })
}

fn bytes_of(spec: String) -> Result<Vec<u8>> {
    image(spec).map(|found| found.0)
}

#[track_caller]
fn fails(spec: String, kind: Kind, why: &str) -> String {
    let error = bytes_of(spec).unwrap_err();
    let said = error.to_string();
    assert!(error.kind() == kind && said.contains(why), "{:?}: {said}", error.kind());
    assert!(error.is_complete() && !said.contains('\n') && !said.contains("hidden"), "{said}");
    said
}

/// A layer with these files, made by tar.
fn layer(files: &[(&str, &[u8])]) -> Vec<u8> {
    let folder = tempfile::tempdir().unwrap();
    for (name, bytes) in files {
        let path = folder.path().join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, bytes).unwrap();
    }
    tar(folder.path(), &["."])
}

fn tar(folder: &Path, words: &[&str]) -> Vec<u8> {
    let mut command = Command::new("tar");
    command.args(["--sort=name", "-C"]).arg(folder).args(["-cf", "-"]).args(words);
    let output = command.output().unwrap();
    assert!(output.status.success());
    output.stdout
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let file = tempfile::NamedTempFile::new().unwrap();
    file.as_file().write_all(bytes).unwrap();
    Command::new("gzip").arg("-c").arg(file.path()).output().unwrap().stdout
}

fn zstd_of(bytes: &[u8]) -> Vec<u8> {
    zstd::bulk::compress(bytes, 3).unwrap()
}

/// Stores an image of these layers.
fn push(server: &RegistryServer, tag: &str, layers: &[(&str, Vec<u8>)]) -> String {
    let descriptors: Vec<_> = layers
        .iter()
        .map(|(end, bytes)| server.add_blob(&format!("{TAR}{end}"), bytes.clone(), ""))
        .collect();
    let config = r#"{"architecture":"amd64","os":"linux"}"#.as_bytes().to_vec();
    let config = server.add_blob(CONFIG, config, "");
    let layers = descriptors.join(",");
    let text = format!("{{\"schemaVersion\":2,\"config\":{config},\"layers\":[{layers}]}}");
    server.add_manifest("disks/vm", tag, text)
}

fn disk() -> Vec<u8> {
    let mut bytes = content(5, 700_000);
    bytes[100_000..500_000].fill(0);
    bytes
}

#[test]
fn disks_are_found_in_packed_layers_and_later_ones_count() {
    let server = RegistryServer::plain();
    let bytes = disk();
    let plain = layer(&[("disk/vm.img", &bytes), ("etc/passwd", b"root")]);
    for (tag, packed) in [("", plain.clone()), ("+gzip", gzip(&plain)), ("+zstd", zstd_of(&plain))]
    {
        let digest = push(&server, "v1", &[(tag, packed.clone())]);
        let (found, said, version) = image(server.spec("disks/vm:v1")).unwrap();
        assert!(found == bytes, "{tag}");
        assert_eq!(version, digest);
        let layer = super::registry_server::digest(&packed);
        assert!(
            said.contains("/disk/vm.img of 700000 bytes")
                && said.contains(&digest)
                && said.contains(&layer),
            "{said}"
        );
        assert!(bytes_of(server.spec(&format!("disks/vm@{digest}"))).unwrap() == bytes);
    }
    // Two members of gzip.
    let parts = [gzip(&plain[..10_000]), gzip(&plain[10_000..])].concat();
    push(&server, "parts", &[("+gzip", parts)]);
    assert!(bytes_of(server.spec("disks/vm:parts")).unwrap() == bytes);
    let other = layer(&[("disk/other.img", b"other"), ("disk/.wh.vm.img", b"")]);
    push(&server, "v2", &[("+gzip", gzip(&plain)), ("", other.clone())]);
    assert_eq!(bytes_of(server.spec("disks/vm:v2")).unwrap(), b"other");
    let several = layer(&[("disk/b.img", b"b")]);
    push(&server, "v3", &[("", plain), ("", several)]);
    fails(server.spec("disks/vm:v3"), Kind::Unsupported, "2 files");
    assert_eq!(bytes_of(server.spec("disks/vm:v3#disk=b.img")).unwrap(), b"b");
    assert_eq!(bytes_of(server.spec("disks/vm:v3#disk=/etc/passwd")).unwrap(), b"root");
}

#[test]
fn tar_files_of_other_programs_are_read() {
    let server = RegistryServer::plain();
    let folder = tempfile::tempdir().unwrap();
    let long = "n".repeat(150);
    std::fs::create_dir_all(folder.path().join("disk")).unwrap();
    let bytes = disk();
    std::fs::write(folder.path().join("disk").join(&long), &bytes).unwrap();
    for format in ["gnu", "pax", "posix", "oldgnu"] {
        let packed = tar(folder.path(), &[&format!("--format={format}"), "disk"]);
        push(&server, "long", &[("", packed)]);
        assert!(bytes_of(server.spec("disks/vm:long")).unwrap() == bytes, "{format}");
    }
    let sparse = std::fs::File::create(folder.path().join("disk/sparse")).unwrap();
    sparse.set_len(10 << 20).unwrap();
    for format in ["gnu", "pax"] {
        let packed = tar(folder.path(), &["-S", &format!("--format={format}"), "disk"]);
        push(&server, "sparse", &[("", packed)]);
        fails(server.spec("disks/vm:sparse#disk=sparse"), Kind::Unsupported, "sparse");
        assert!(bytes_of(server.spec(&format!("disks/vm:sparse#disk={long}"))).unwrap() == bytes);
    }
    std::fs::remove_file(folder.path().join("disk/sparse")).unwrap();
    std::fs::hard_link(folder.path().join("disk").join(&long), folder.path().join("disk/b"))
        .unwrap();
    push(&server, "linked", &[("", tar(folder.path(), &["disk"]))]);
    assert!(bytes_of(server.spec("disks/vm:linked#disk=b")).unwrap() == bytes);
    // The name that tar stores as the file is not read.
    fails(server.spec(&format!("disks/vm:linked#disk={long}")), Kind::Unsupported, "a hard link");
}

#[test]
fn nothing_unproven_is_returned() {
    let bytes = disk();
    let plain = layer(&[("disk/vm.img", &bytes)]);
    // Each kind of content is replaced by another one of the same length.
    for part in ["manifests/v1", "manifests/sha256:", "layer", "config"] {
        let server = RegistryServer::plain();
        let manifest = push(&server, "v1", &[("", plain.clone())]);
        let mut contents = server.contents();
        let (config, layer) = (digest(br#"{"architecture":"amd64","os":"linux"}"#), digest(&plain));
        let image = if part.starts_with("manifests/sha256") {
            format!("disks/vm@{manifest}")
        } else {
            "disks/vm:v1".to_owned()
        };
        match part {
            "layer" => {
                let mut other = plain.clone();
                let at = other.len() / 2;
                other[at] ^= 1;
                contents.blobs.insert(layer, other.into());
            }
            "config" => drop(
                contents
                    .blobs
                    .insert(config, br#"{"architecture":"arm64","os":"linux"}"#.to_vec().into()),
            ),
            "manifests/v1" => {
                // The name of the digest that it sends is another one.
                drop(contents);
                let own = server.contents().manifests["disks/vm/manifests/v1"].1.clone();
                let liar = RegistryServer::start(move |request| {
                    let fields = format!("Docker-Content-Digest: sha256:{}\r\n", "0".repeat(64));
                    request.target.contains("manifests").then(|| (200, fields, own.clone()))
                });
                fails(liar.spec("disks/vm:v1"), Kind::Io, "not those of sha256:000");
                continue;
            }
            _ => {
                let known =
                    contents.manifests.get_mut(&format!("disks/vm/manifests/{manifest}")).unwrap();
                known.1.push(b' ');
            }
        }
        drop(contents);
        fails(server.spec(&image), Kind::Io, "not those of sha256:");
    }
    // Lengths.
    for (end, why) in [(1, "less than"), (0, "more than")] {
        let cut = plain[..plain.len() - end].to_vec();
        let server = RegistryServer::plain();
        push(&server, "v1", &[("", plain.clone())]);
        let longer = [cut, vec![0; if end == 0 { 9 } else { 0 }]].concat();
        server.contents().blobs.insert(digest(&plain), longer.into());
        let error = bytes_of(server.spec("disks/vm:v1")).unwrap_err();
        let said = error.to_string();
        assert!(said.contains(why) || said.contains("another range"), "{said}");
    }
}

#[test]
fn damaged_and_unknown_images_are_refused() {
    let server = RegistryServer::plain();
    let plain = layer(&[("disk/vm.img", &disk())]);
    for (end, bytes, kind, why) in [
        ("+gzip", plain.clone(), Kind::Invalid, "not a gzip file"),
        ("+gzip", gzip(&plain)[..1000].to_vec(), Kind::Invalid, "end is missing"),
        ("+zstd", zstd_of(&plain)[..1000].to_vec(), Kind::Invalid, "end is missing"),
        ("", plain[..5000].to_vec(), Kind::Invalid, "end is missing"),
        ("+xz", plain.clone(), Kind::Unsupported, "tar+xz"),
        ("", layer(&[("etc/passwd", b"x")]), Kind::NotFound, "has no disk"),
    ] {
        push(&server, "bad", &[(end, bytes)]);
        fails(server.spec("disks/vm:bad"), kind, why);
    }
    // A few bytes that become many: the size in the header of the member bounds what is stored.
    let bomb =
        zstd_of(&[layer(&[("disk/vm.img", b"x")])[..1024].to_vec(), vec![0; 64 << 20]].concat());
    assert!(bomb.len() < 100_000);
    push(&server, "bomb", &[("+zstd", bomb)]);
    fails(server.spec("disks/vm:bomb"), Kind::NotFound, "has no disk");
    for (text, why) in [
        ("{\"schemaVersion\":1,\"fsLayers\":[]}".to_owned(), "schema 1"),
        ("{}".to_owned(), "schema 1"),
        ("<html>".to_owned(), "no JSON"),
        (
            format!("{{\"schemaVersion\":2,\"x\":\"{}\"}}", "x".repeat(5 << 20)),
            "more than 4194304 bytes",
        ),
    ] {
        server.add_manifest("disks/vm", "odd", text);
        let said = bytes_of(server.spec("disks/vm:odd")).unwrap_err().to_string();
        assert!(said.contains(why), "{said}");
    }
    fails(
        server.spec("disks/vm:none"),
        Kind::NotFound,
        "404 Not Found\"; check the name of the image",
    );
    for (spec, why) in [
        ("oci://h", "no name of an image"),
        ("oci://h/A:1", "lower-case"),
        ("oci:", "no image"),
        ("oci://u:hidden@h/a", "visible to other users"),
        ("oci://u@h/a", "belong together"),
        ("oci://h/a#password-file=x", "belong together"),
        ("oci:/dir:1#ca=x", "a local directory has no"),
        ("oci://h/a#insecure=on&ca=x", "ca is for https"),
        ("oci://h/a#other=1", "unknown option"),
        ("oci://h:99999/a#insecure=on", "no host"),
    ] {
        let said = bytes_of(spec.to_owned()).unwrap_err().to_string();
        assert!(said.contains(why) && !said.contains("hidden"), "{said}");
    }
}

#[test]
fn artefacts_are_files_and_indexes_have_platforms() {
    let server = RegistryServer::plain();
    let bytes = disk();
    let title =
        |name: &str| format!(",\"annotations\":{{\"org.opencontainers.image.title\":\"{name}\"}}");
    let one = server.add_blob("application/x-raw", bytes.clone(), &title("vm.raw"));
    let two = server.add_blob("text/plain", b"notes".to_vec(), &title("README"));
    let config = server.add_blob("application/vnd.oci.empty.v1+json", b"{}".to_vec(), "");
    let manifest =
        |files: &str| format!("{{\"schemaVersion\":2,\"config\":{config},\"layers\":[{files}]}}");
    server.add_manifest("disks/vm", "one", manifest(&one));
    assert!(bytes_of(server.spec("disks/vm:one")).unwrap() == bytes);
    server.add_manifest("disks/vm", "two", manifest(&format!("{one},{two}")));
    fails(server.spec("disks/vm:two"), Kind::Unsupported, "has 2 files");
    assert!(bytes_of(server.spec("disks/vm:two#disk=vm.raw")).unwrap() == bytes);
    fails(server.spec("disks/vm:two#disk=x"), Kind::NotFound, "none of the 2 files");
    let entry = |digest: &str, size: usize, arch: &str| {
        format!(
            "{{\"mediaType\":\"m\",\"digest\":\"{digest}\",\"size\":{size},\"platform\":{{\"os\":\"linux\",\
             \"architecture\":\"{arch}\"}}}}"
        )
    };
    let mut entries = Vec::new();
    for arch in ["amd64", "arm64"] {
        let text = manifest(&server.add_blob("t", arch.as_bytes().to_vec(), ""));
        let digest = server.add_manifest("disks/vm", arch, text.clone());
        entries.push(entry(&digest, text.len(), arch));
    }
    let index = format!("{{\"schemaVersion\":2,\"manifests\":[{}]}}", entries.join(","));
    let digest = server.add_manifest("disks/vm", "all", index.clone());
    for arch in ["amd64", "arm64"] {
        assert_eq!(
            bytes_of(server.spec(&format!("disks/vm:all#arch={arch}"))).unwrap(),
            arch.as_bytes()
        );
    }
    fails(server.spec("disks/vm:all#arch=s390x"), Kind::NotFound, "linux/amd64, linux/arm64");
    // Indexes within one another.
    let (mut inner, mut len) = (digest, index.len());
    for depth in 0..4 {
        let text =
            format!("{{\"schemaVersion\":2,\"manifests\":[{}]}}", entry(&inner, len, "arm64"));
        len = text.len();
        inner = server.add_manifest("disks/vm", &format!("nested{depth}"), text);
    }
    assert_eq!(bytes_of(server.spec("disks/vm:nested1#arch=arm64")).unwrap(), b"arm64");
    fails(server.spec("disks/vm:nested2#arch=arm64"), Kind::Unsupported, "within one another");
    push(&server, "amd", &[("", layer(&[("disk/a", b"1")]))]);
    fails(server.spec("disks/vm:amd#arch=arm64"), Kind::NotFound, "for amd64 alone");
}

/// A registry that wants a token, which its own service sells for these credentials, for so many requests.
fn with_tokens(
    tls: Option<SslContext>,
    login: TokenLogin,
    expires: usize,
) -> (RegistryServer, std::sync::Arc<AtomicUsize>) {
    let uses = AtomicUsize::new(usize::MAX / 2);
    let tokens = std::sync::Arc::new(AtomicUsize::new(0));
    let sold = tokens.clone();
    let scheme = if tls.is_some() { "https" } else { "http" };
    let serve = move |request: &HttpRequest| -> Option<HttpAnswer> {
        let host = request.field("host").unwrap();
        if request.target.starts_with("/token") {
            let form = String::from_utf8(request.body.clone()).unwrap();
            let is_right = match login {
                // me:hidden
                TokenLogin::Password => {
                    request.field("authorization") == Some("Basic bWU6aGlkZGVu")
                        && request.target.contains("scope=repository%3Adisks%2Fvm%3Apull")
                }
                TokenLogin::Identity => {
                    request.method == "POST"
                        && ["grant_type=refresh_token", "refresh_token=hidden%3Atoken", "service=s"]
                            .iter()
                            .all(|field| form.split('&').any(|found| found == *field))
                        && form.contains("scope=repository%3Adisks%2Fvm%3Apull")
                }
            };
            if !is_right {
                return Some((401, String::new(), Vec::new()));
            }
            uses.store(0, Ordering::SeqCst);
            let number = sold.fetch_add(1, Ordering::SeqCst);
            return Some((200, String::new(), format!("{{\"token\":\"t{number}\"}}").into_bytes()));
        }
        let number = sold.load(Ordering::SeqCst).wrapping_sub(1);
        let is_valid = request.field("authorization") == Some(&format!("Bearer t{number}"));
        if is_valid && uses.fetch_add(1, Ordering::SeqCst) < expires {
            return None;
        }
        let field = format!(
            "WWW-Authenticate: Bearer realm=\"{scheme}://{host}/token\",service=\"s\",\
             scope=\"repository:disks/vm:pull\"\r\n"
        );
        Some((401, field, Vec::new()))
    };
    let server = match tls {
        Some(context) => RegistryServer::secure(context, serve),
        None => RegistryServer::start(serve),
    };
    (server, tokens)
}

/// What a service of tokens wants.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum TokenLogin {
    Password,
    Identity,
}

/// `USER@` and the option for a password.
fn as_user(
    server: &RegistryServer,
    user: &str,
    password: &str,
) -> (String, tempfile::NamedTempFile) {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), format!("{password}\n")).unwrap();
    let spec = format!(
        "oci://{user}@{}/disks/vm:v1#password-file={}",
        server.address(),
        file.path().display()
    );
    (spec, file)
}

#[test]
fn tokens_are_bought_with_credentials_and_renewed_once() {
    let bytes = disk();
    for (expires, most) in [(1000, 1), (2, 3), (1, 3)] {
        let (server, tokens) = with_tokens(None, TokenLogin::Password, expires);
        push(&server, "v1", &[("", layer(&[("disk/a", &bytes)]))]);
        let (spec, _file) = as_user(&server, "me", "hidden");
        assert!(bytes_of(spec).unwrap() == bytes, "{expires}");
        assert!((1..=most).contains(&tokens.load(Ordering::SeqCst)), "{expires}");
    }
    let (server, _) = with_tokens(None, TokenLogin::Password, 0);
    let (spec, _file) = as_user(&server, "me", "hidden");
    fails(spec, Kind::Refused, "401");
    let (spec, _file) = as_user(&server, "me", "wrong");
    fails(spec, Kind::Refused, "401");
}

#[test]
fn registries_are_checked_against_the_authority() {
    let authority = certificate("authority", 10, None);
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), authority.certificate.to_pem().unwrap()).unwrap();
    let right = certificate("127.0.0.1", 10, Some(&authority));
    let bytes = disk();
    let (server, tokens) = with_tokens(Some(context(&right)), TokenLogin::Password, 1000);
    push(&server, "v1", &[("", layer(&[("disk/a", &bytes)]))]);
    let (spec, _file) = as_user(&server, "me", "hidden");
    let ca = format!("&ca={}", file.path().display());
    assert!(bytes_of(format!("{spec}{ca}")).unwrap() == bytes);
    assert_eq!(tokens.load(Ordering::SeqCst), 1);
    // The system does not know the authority.
    fails(format!("{spec}&insecure=off"), Kind::Refused, "certificate verify failed");
    // Without TLS nothing of a registry with TLS is used.
    assert!(bytes_of(spec).is_err());
    let other = certificate("127.0.0.2", 10, Some(&authority));
    let (server, tokens) = with_tokens(Some(context(&other)), TokenLogin::Password, 1000);
    push(&server, "v1", &[("", layer(&[("disk/a", &bytes)]))]);
    let (spec, _file) = as_user(&server, "me", "hidden");
    fails(format!("{spec}{ca}"), Kind::Refused, "mismatch");
    assert_eq!((tokens.load(Ordering::SeqCst), server.requests().len()), (0, 0));
}

/// The image that a process of [`login_files_and_helpers_have_the_credentials`] reads.
const CHILD_IMAGE: &str = "BLOCKHAUL_TEST_IMAGE";

/// Variables count for a process: each case is read by one of its own.
#[test]
fn login_files_and_helpers_have_the_credentials() {
    if let Ok(spec) = std::env::var(CHILD_IMAGE) {
        match bytes_of(spec) {
            Ok(bytes) => assert!(bytes == disk()),
            Err(error) => panic!("{error}"),
        }
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    let helper = path("docker-credential-test");
    let script = "#!/bin/sh\nread -r server; case \"$1 $server\" in\n\
                  'get 127.0.0.1:'*) printf '{\"Username\":\"%s\",\"Secret\":\"%s\"}' \"$USER_OF_TEST\" hidden${MORE_OF_TEST};;\n\
                  *) echo hidden; exit 1;; esac\n";
    std::fs::write(&helper, script).unwrap();
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    std::fs::set_permissions(&helper, mode).unwrap();
    std::fs::create_dir_all(path(".docker")).unwrap();
    let programs = format!("{}:{}", folder.path().display(), std::env::var("PATH").unwrap());
    let read = |server: &RegistryServer, more: &[(&str, &str)]| {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "oci::login_files_and_helpers_have_the_credentials"]);
        command.env(CHILD_IMAGE, server.spec("disks/vm:v1")).env("PATH", &programs);
        command.env("HOME", folder.path()).env("XDG_RUNTIME_DIR", folder.path());
        command.env_remove("REGISTRY_AUTH_FILE").env_remove("DOCKER_CONFIG");
        command.envs(more.iter().copied());
        let output =
            blockhaul_testkit::tools::output(&mut command, Duration::from_secs(60)).unwrap();
        let said = blockhaul_testkit::tools::text(&[output.stdout, output.stderr].concat());
        assert!(!said.contains("hidden"), "{said}");
        (output.status.success(), said)
    };
    let docker = path(".docker/config.json");
    for login in [TokenLogin::Password, TokenLogin::Identity] {
        let (server, _) = with_tokens(None, login, 1000);
        push(&server, "v1", &[("", layer(&[("disk/a", &disk())]))]);
        let host = server.address();
        let member = match login {
            TokenLogin::Password => r#""auth":"bWU6aGlkZGVu""#,
            TokenLogin::Identity => r#""identitytoken":"hidden:token""#,
        };
        let file = path("auth.json");
        std::fs::write(&file, format!("{{\"auths\":{{\"{host}\":{{{member}}}}}}}")).unwrap();
        let named = [("REGISTRY_AUTH_FILE", file.to_str().unwrap())];
        let (is_read, said) = read(&server, &named);
        assert!(is_read, "{login:?}: {said}");
        let (is_read, said) = read(&server, &[]);
        assert!(!is_read && said.contains("skopeo login"), "{said}");
        let variables = match login {
            TokenLogin::Password => [("USER_OF_TEST", "me"), ("MORE_OF_TEST", "")],
            TokenLogin::Identity => [("USER_OF_TEST", "<token>"), ("MORE_OF_TEST", ":token")],
        };
        for text in [
            format!("{{\"credHelpers\":{{\"{host}\":\"test\"}}}}"),
            format!("{{\"auths\":{{\"{host}\":{{}}}},\"credsStore\":\"test\"}}"),
        ] {
            std::fs::write(&docker, &text).unwrap();
            let (is_read, said) = read(&server, &variables);
            assert!(is_read, "{login:?} {text}: {said}");
        }
        for (name, why) in [("absent", "cannot be run"), ("../x", "not allowed")] {
            let text = format!("{{\"credHelpers\":{{\"{host}\":\"{name}\"}}}}");
            std::fs::write(&docker, text).unwrap();
            let (is_read, said) = read(&server, &[]);
            assert!(!is_read && said.contains(why), "{said}");
        }
        std::fs::remove_file(&docker).unwrap();
    }
}

#[test]
fn credentials_go_to_the_registry_and_its_service_alone() {
    let bytes = disk();
    // Another server has the blobs, and asks for credentials.
    let stored = layer(&[("disk/a", &bytes)]);
    let blob = stored.clone();
    let far = RegistryServer::start(move |request| {
        assert_eq!(request.field("authorization"), None, "another server got credentials");
        assert_eq!(request.field("x-own"), None);
        Some(send(request, &blob))
    });
    let asks = RegistryServer::start(|request| {
        let host = request.field("host").unwrap();
        assert_eq!(request.field("authorization"), None, "another server got credentials");
        assert!(!request.target.starts_with("/token"), "its challenge counts");
        let field = format!("WWW-Authenticate: Bearer realm=\"http://{host}/token\"\r\n");
        Some((401, field, Vec::new()))
    });
    for (place, is_refused) in [(far.address(), false), (asks.address(), true)] {
        let layer_digest = digest(&stored);
        let near = RegistryServer::start(move |request| {
            if request.field("authorization") != Some("Basic bWU6aGlkZGVu") {
                return Some((
                    401,
                    "WWW-Authenticate: Basic realm=\"r\"\r\n".to_owned(),
                    Vec::new(),
                ));
            }
            let is_layer = request.target.ends_with(&layer_digest);
            is_layer.then(|| (307, format!("Location: http://{place}/blob\r\n"), Vec::new()))
        });
        push(&near, "v1", &[("", stored.clone())]);
        let (spec, _file) = as_user(&near, "me", "hidden");
        if is_refused {
            fails(spec, Kind::Refused, "401");
        } else {
            assert!(bytes_of(spec).unwrap() == bytes);
        }
    }
    assert_eq!(far.requests().len(), 1);
    let none = RegistryServer::start(|_| {
        Some((401, "WWW-Authenticate: Basic realm=\"r\"\r\n".to_owned(), Vec::new()))
    });
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), "X-Own: hidden\n").unwrap();
    let spec = format!("{}#header-file={}", none.spec("disks/vm:v1"), file.path().display());
    fails(spec, Kind::Refused, "skopeo login");
    assert!(none.requests().iter().all(|request| request.field("x-own") == Some("hidden")));
}

#[test]
fn blobs_go_on_behind_broken_connections() {
    let bytes = content(9, 3 << 20);
    let stored = layer(&[("disk/a", &bytes)]);
    for has_ranges in [true, false] {
        let blob = stored.clone();
        let layer_digest = digest(&stored);
        let count = AtomicUsize::new(0);
        let server = RegistryServer::start(move |request| {
            if !request.target.ends_with(&layer_digest) {
                return None;
            }
            let mut request = request.clone();
            if !has_ranges {
                request.fields.remove("range");
            }
            let (status, mut fields, body) = send(&request, &blob);
            if count.fetch_add(1, Ordering::SeqCst) < 3 {
                fields += CUT;
            }
            Some((status, fields, body))
        });
        push(&server, "v1", &[("", stored.clone())]);
        assert!(bytes_of(server.spec("disks/vm:v1")).unwrap() == bytes, "{has_ranges}");
    }
}

#[test]
fn a_directory_of_images_is_read() {
    let folder = tempfile::tempdir().unwrap();
    let server = RegistryServer::plain();
    let bytes = disk();
    let digest = push(&server, "v1", &[("+zstd", zstd_of(&layer(&[("disk/a", &bytes)])))]);
    std::fs::create_dir_all(folder.path().join("blobs/sha256")).unwrap();
    let place = |digest: &str| folder.path().join("blobs").join(digest.replace(':', "/"));
    for (digest, bytes) in &server.contents().blobs {
        std::fs::write(place(digest), &**bytes).unwrap();
    }
    std::fs::write(place(&digest), &server.contents().manifests["disks/vm/manifests/v1"].1)
        .unwrap();
    let entry = |tag: &str| {
        format!(
            "{{\"digest\":\"{digest}\",\"size\":1,\"annotations\":{{\"org.opencontainers.image.ref.name\":\"{tag}\"}}}}"
        )
    };
    let write = |entries: &str| {
        let text = format!("{{\"schemaVersion\":2,\"manifests\":[{entries}]}}");
        std::fs::write(folder.path().join("index.json"), text).unwrap();
    };
    let spec = |end: &str| format!("oci:{}{end}", folder.path().display());
    write(&entry("v1"));
    assert!(bytes_of(spec("")).unwrap() == bytes);
    assert!(bytes_of(spec(":v1")).unwrap() == bytes);
    fails(spec(":v2"), Kind::NotFound, "no such image");
    write(&[entry("v1"), entry("v2")].join(","));
    assert!(bytes_of(spec(":v2")).unwrap() == bytes);
    fails(spec(""), Kind::Usage, "several images");
    write("");
    fails(spec(""), Kind::NotFound, "no such image");
    std::fs::write(folder.path().join("index.json"), "x").unwrap();
    fails(spec(""), Kind::Invalid, "no layout");
    std::fs::remove_file(folder.path().join("index.json")).unwrap();
    assert_eq!(bytes_of(spec("")).unwrap_err().kind(), Kind::NotFound);
}

#[test]
fn images_that_skopeo_has_copied_are_read() {
    let skopeo = blockhaul_testkit::require_peer!("skopeo");
    let server = RegistryServer::plain();
    let bytes = disk();
    push(&server, "v1", &[("", layer(&[("disk/a", &bytes)])), ("", layer(&[("etc/x", b"y")]))]);
    let folder = tempfile::tempdir().unwrap();
    let layout = folder.path().join("layout");
    let layout = layout.display();
    let named = |tag: &str| format!("docker://{}/disks/vm:{tag}", server.address());
    let copy = |words: &[&str]| {
        let mut command = skopeo.command();
        command.args([
            "--insecure-policy",
            "copy",
            "--src-tls-verify=false",
            "--dest-tls-verify=false",
        ]);
        command.env("HOME", folder.path()).args(words);
        let output =
            blockhaul_testkit::tools::output(&mut command, Duration::from_secs(60)).unwrap();
        let said = blockhaul_testkit::tools::text(&output.stderr);
        assert!(output.status.success(), "{words:?}: {said}");
    };
    copy(&[&named("v1"), &format!("oci:{layout}:mine")]);
    assert!(bytes_of(format!("oci:{layout}:mine")).unwrap() == bytes);
    // Back, packed, and as the type of Docker.
    for (tag, format, pack) in
        [("v2", "oci", "gzip"), ("v3", "v2s2", "gzip"), ("v4", "oci", "zstd")]
    {
        let source = format!("oci:{layout}:mine");
        copy(&[
            &format!("--format={format}"),
            &format!("--dest-compress-format={pack}"),
            &source,
            &named(tag),
        ]);
        let (found, said, _) = image(server.spec(&format!("disks/vm:{tag}"))).unwrap();
        assert!(found == bytes, "{tag}: {said}");
    }
    let kinds = server.contents().manifests["disks/vm/manifests/v3"].0.clone();
    assert!(kinds.contains("docker"), "{kinds}");
}

#[test]
fn a_disk_is_read_only_and_its_registry_may_be_gone() {
    let is_gone = std::sync::Arc::new(AtomicBool::new(false));
    let gone = is_gone.clone();
    let server = RegistryServer::start(move |_| {
        gone.load(Ordering::SeqCst).then(|| (500, String::new(), Vec::new()))
    });
    let bytes = disk();
    push(&server, "v1", &[("", layer(&[("disk/a", &bytes)]))]);
    let spec = server.spec("disks/vm:v1");
    let seen = Mutex::new(bytes);
    on_a_worker(move || async move {
        let stack = open_image(&spec).await.unwrap();
        is_gone.store(true, Ordering::SeqCst);
        let seen = seen.into_inner().unwrap();
        for at in [600_000, 5, 300_000] {
            assert!(read(&stack, at, 1000).await.unwrap() == seen[at as usize..at as usize + 1000]);
        }
        let write = stack.device().submit(Request::zero(0, 10)).await;
        assert!(write.is_err());
        blockhaul_io::offload(move || drop(stack)).await.unwrap();
    });
}
