//! Files of real web servers: nginx, alone and with a cache of slices before it, Apache with WebDAV, and Caddy.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::Command;

use blockhaul_testkit::require_peer;
use blockhaul_testkit::rng::Rng;
use blockhaul_testkit::tools::{self, ScratchDir, text};

use crate::remote::{ports, same, start};
use crate::served_disk::{LIMIT, OURS, succeed};

/// A directory that servers without rights can use, with a disk in `files`.
fn scratch(seed: u64) -> ScratchDir {
    let scratch = ScratchDir::new().unwrap();
    let files = scratch.file("files");
    fs::create_dir_all(files.join("folder")).unwrap();
    let mut bytes = Rng::new(seed).disk(9 << 20, 300_000, 60);
    bytes.resize((12 << 20) + 7, 9);
    fs::write(files.join("a disk.raw"), bytes).unwrap();
    for folder in [scratch.path(), &files] {
        fs::set_permissions(folder, fs::Permissions::from_mode(0o777)).unwrap();
    }
    scratch
}

/// Reads the disk at `URL/a%20disk.raw` in each way.
fn read_all(scratch: &ScratchDir, url: &str) {
    let disk = scratch.file("files/a disk.raw");
    let (disk, url) = (disk.to_str().unwrap(), format!("{url}/a%20disk.raw"));
    let copied = scratch.file("copied.raw");
    succeed(&["copy", &url, copied.to_str().unwrap()]);
    assert!(same(Path::new(disk), &copied), "{url}");
    succeed(&["compare", &format!("{url}#connections=3"), disk]);
    fs::remove_file(copied).unwrap();
}

const NGINX: &str = "
daemon off;
master_process off;
pid nginx.pid;
error_log stderr;
events {}
http {
    access_log off;
    client_body_temp_path t1; proxy_temp_path t2; fastcgi_temp_path t3; uwsgi_temp_path t4; scgi_temp_path t5;
    proxy_cache_path cache keys_zone=slices:1m;
    server { listen 127.0.0.1:PLAIN; root files; }
    server {
        listen 127.0.0.1:CACHE;
        location / {
            slice 1m;
            proxy_cache slices;
            proxy_cache_key $uri$slice_range;
            proxy_set_header Range $slice_range;
            proxy_cache_valid 200 206 1h;
            proxy_pass http://127.0.0.1:PLAIN;
        }
    }
}
";

#[test]
fn nginx_and_its_cache_of_slices_are_read() {
    let nginx = require_peer!("nginx");
    let scratch = scratch(21);
    let [plain, cache] = ports();
    let config = NGINX.replace("PLAIN", &plain.to_string()).replace("CACHE", &cache.to_string());
    fs::write(scratch.file("nginx.conf"), config).unwrap();
    let mut command = nginx.tied_command();
    command.args(["-e", "stderr", "-c", "nginx.conf", "-p"]).arg(scratch.path());
    let _server = start(&mut command, cache);
    // The second time from the cache.
    for port in [plain, cache, cache] {
        read_all(&scratch, &format!("http://127.0.0.1:{port}"));
    }
    refuse_list(&format!("dav://127.0.0.1:{plain}/"), "WebDAV");
    // A cache may show the earlier version, but no mix.
    let before = fs::read(scratch.file("files/a disk.raw")).unwrap();
    let fresh = Rng::new(22).disk(12 << 20, 300_000, 60);
    fs::write(scratch.file("files/a disk.raw"), &fresh).unwrap();
    let url = format!("http://127.0.0.1:{cache}/a%20disk.raw");
    let copied = scratch.file("copied.raw");
    let mut command = Command::new(OURS);
    command.args(["copy", &url]).arg(&copied);
    if tools::output(&mut command, LIMIT).unwrap().status.success() {
        let found = fs::read(&copied).unwrap();
        assert!(found == before || found == fresh);
    }
}

fn refuse_list(url: &str, why: &str) {
    let output = tools::output(Command::new(OURS).args(["info", "--list", url]), LIMIT).unwrap();
    let said = text(&output.stderr);
    assert!(!output.status.success() && said.contains(why), "{said}");
}

const APACHE: &str = "
LoadModule mpm_event_module /usr/lib/apache2/modules/mod_mpm_event.so
LoadModule authz_core_module /usr/lib/apache2/modules/mod_authz_core.so
LoadModule dav_module /usr/lib/apache2/modules/mod_dav.so
LoadModule dav_fs_module /usr/lib/apache2/modules/mod_dav_fs.so
ServerName localhost
Listen 127.0.0.1:PORT
User #65534
Group #65534
PidFile apache.pid
ErrorLog error.log
StartServers 1
DavLockDB PLACE/locks
DocumentRoot PLACE/files
<Directory PLACE/files>
    Dav On
    Require all granted
</Directory>
";

#[test]
fn apache_with_webdav_is_read_and_lists_its_files() {
    let apache = require_peer!("apache2");
    let scratch = scratch(23);
    let [port] = ports();
    let place = scratch.path().display().to_string();
    let config = APACHE.replace("PORT", &port.to_string()).replace("PLACE", &place);
    let path = scratch.file("apache.conf");
    fs::write(&path, config).unwrap();
    let mut command = apache.tied_command();
    // One process, which is ended as a whole.
    command.arg("-d").arg(scratch.path()).arg("-f").arg(path).arg("-X");
    let _server = start(&mut command, port);
    read_all(&scratch, &format!("dav://127.0.0.1:{port}"));
    let list = |url: &str| {
        let mut command = Command::new(OURS);
        let output = tools::output(command.args(["info", "--list", "--json", url]), LIMIT).unwrap();
        assert!(output.status.success(), "{}", text(&output.stderr));
        serde_json::from_slice::<serde_json::Value>(&output.stdout).unwrap()
    };
    let url = format!("dav://127.0.0.1:{port}");
    let listed = list(&url);
    let objects = listed["objects"].as_array().unwrap();
    assert!(objects.len() == 1 && objects[0]["name"] == "a disk.raw", "{listed}");
    assert_eq!(objects[0]["size"], (12 << 20) + 7, "{listed}");
    assert!(objects[0]["etag"].is_string() && objects[0]["changed"].is_string(), "{listed}");
    assert_eq!(list(&format!("{url}/folder"))["objects"], serde_json::json!([]));
    refuse_list(&format!("{url}/none"), "404");
    refuse_list(&format!("http://127.0.0.1:{port}/"), "has no list");
}

#[test]
fn caddy_is_read() {
    let caddy = require_peer!("caddy");
    let scratch = scratch(24);
    let [port] = ports();
    let mut command = caddy.tied_command();
    command.args(["file-server", "--listen", &format!("127.0.0.1:{port}"), "--root", "files"]);
    command.current_dir(scratch.path()).env("HOME", scratch.path());
    let _server = start(&mut command, port);
    read_all(&scratch, &format!("http://127.0.0.1:{port}"));
}
