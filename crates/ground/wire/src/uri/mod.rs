//! NBD URIs (`doc/uri.md` of the `nbd` project, with the parameters that libnbd adds).
//!
//! ```text
//! nbd://host:10809/export            nbds://…            TCP, TLS
//! nbd+unix:///export?socket=PATH     nbds+unix://…       Unix socket
//! nbd+vsock://cid:port/export        nbds+vsock://…      virtual machine socket
//! ```
//!
//! Export names and parameters are percent-decoded. Names may be any text without NUL; a socket's
//! path may be any bytes (a leading NUL is Linux's abstract namespace).

mod http;
mod nbd;
mod parse;

pub use self::http::{HttpUri, SCHEMES as HTTP_SCHEMES, is_http};
pub use self::nbd::{
    PARAMETERS, SCHEMES, TlsParameters, TlsType, Transport, Uri, UriError, is_uri,
};

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limits;

    fn canonical(text: &str) -> String {
        Uri::parse(text).unwrap().to_string()
    }

    fn error(text: &str) -> String {
        Uri::parse(text).unwrap_err().to_string()
    }

    #[test]
    fn the_documents_examples() {
        for (text, export) in [
            ("nbd://example.com/disk", "disk"),
            ("nbd+unix:///disk?socket=sock", "disk"),
            ("nbd://example.com/", ""),
            ("nbd://example.com", ""),
            ("nbd://example.com//disk", "/disk"),
            ("nbd://example.com/hello%20world", "hello world"),
        ] {
            assert_eq!(Uri::parse(text).unwrap().export, export, "{text}");
        }
        let uri = Uri::parse("nbd+unix:///?socket=%00/abstract").unwrap();
        assert_eq!(uri.transport, Transport::Unix { socket: b"\0/abstract".to_vec() });
        assert_eq!(uri.to_string(), "nbd+unix:///?socket=%00/abstract");
    }

    #[test]
    fn canonical_forms() {
        for (text, form) in [
            ("nbd://", "nbd://localhost:10809/"),
            ("NBD://Host", "nbd://Host:10809/"),
            ("nbd://[::1]", "nbd://[::1]:10809/"),
            ("nbd://[fe80::1%25eth0]:1/", "nbd://[fe80::1%25eth0]:1/"),
            ("nbd://127.0.0.1:1/a/b", "nbd://127.0.0.1:1/a/b"),
            ("nbd+unix://?socket=/tmp/s", "nbd+unix:///?socket=/tmp/s"),
            ("nbd+unix:///b%20c.img?socket=/a%26b", "nbd+unix:///b%20c.img?socket=/a%26b"),
            (
                "nbds+unix://alice@/?tls-psk-file=/k&socket=/s&tls-verify-peer=0",
                "nbds+unix://alice@/?socket=/s&tls-psk-file=/k&tls-verify-peer=false",
            ),
            (
                "nbds://h/?tls-type=psk;tls-username=bo%20b&tls-psk-file=/k",
                "nbds://bo%20b@h:10809/?tls-psk-file=/k&tls-type=psk",
            ),
            ("nbds://a@h/?tls-username=a&tls-type=x509", "nbds://a@h:10809/?tls-type=x509"),
            ("nbd+vsock:///x", "nbd+vsock://2:10809/x"),
            ("nbds+vsock://3:4", "nbds+vsock://3:4/"),
            // As in libnbd 1.24.
            ("nbd://h:1/?nbd-port=2", "nbd://h:2/"),
            ("nbd+vsock://3:4/?nbd-port=5&compress=no", "nbd+vsock://3:5/"),
            ("nbd+ssh://h/?compress=0&nbd-port=10809", "nbd+ssh://h/"),
        ] {
            assert_eq!(canonical(text), form, "{text}");
        }
    }

    #[test]
    fn parameters_of_tls_need_tls_to_matter() {
        assert_eq!(canonical("nbd://user@h/?tls-hostname=x"), "nbd://h:10809/");
        let tls = Uri::parse("nbds://h/?tls-hostname=x;tls-certificates=/c").unwrap().tls.unwrap();
        assert_eq!(tls.hostname.as_deref(), Some("x"));
        assert_eq!(tls.certificates.as_deref(), Some("/c"));
    }

    #[test]
    fn ssh_has_a_login_a_port_and_perhaps_a_socket() {
        for uri in [
            "nbd+ssh://host/",
            "nbd+ssh://me@host:2222/disk",
            "nbd+ssh://[::1]:22/",
            "nbds+ssh://host/x?socket=/run/nbd.sock",
            "nbd+ssh://host/?nbd-port=7&compress=true",
        ] {
            assert_eq!(canonical(uri), uri);
        }
        let parsed = Uri::parse("nbd+ssh://me@host:2222/?socket=/a%20b").unwrap();
        let wanted = Transport::Ssh {
            user: Some("me".into()),
            host: "host".into(),
            port: Some(2222),
            socket: Some(b"/a b".to_vec()),
            nbd_port: 10809,
            compress: false,
        };
        assert_eq!(parsed.transport, wanted);
        let parsed = Uri::parse("nbds+ssh://alice@host/").unwrap();
        assert!(matches!(parsed.transport, Transport::Ssh { user: None, port: None, .. }));
        let user = parsed.tls.unwrap().username;
        assert_eq!(user.as_deref(), Some("alice"), "as in libnbd");
    }

    #[test]
    fn errors_say_what_to_write() {
        for (text, part) in [
            ("/tmp/sock", "write \"nbd+unix:///?socket=PATH\""),
            ("host:1:2", "unknown scheme \"host:\""),
            ("http://x/", "known are nbd, nbds"),
            ("nbd:host", "\"nbd://...\""),
            ("nbd+ssh://host:0/", "port \"0\" is not a number from 1 to 65535"),
            ("nbd+ssh://host/?socket=", "is empty"),
            ("nbd+ssh://-oProxyCommand=x/", "cannot start with \"-\""),
            ("nbd+ssh://-l@host/", "cannot start with \"-\""),
            ("nbd://h/?socket=/s", "\"nbd+unix:///EXPORT?socket=PATH\""),
            ("nbds://h/?socket=/s", "\"nbds+unix:///EXPORT?socket=PATH\""),
            ("nbd+vsock:///?socket=/s", "is not allowed with \"nbd+vsock:\""),
            ("nbd+unix:///x", "write \"nbd+unix:///EXPORT?socket=PATH\""),
            ("nbd+unix://disk?socket=s", "three slashes"),
            ("nbd+unix:///?socket=", "is empty"),
            ("nbd+unix:///?socket=a%00b", "NUL"),
            ("nbd://h/?tls-foo=1", "known are socket, nbd-port, compress, tls-certificates"),
            ("nbds://h/?tls-verify-peer=maybe", "must be true or false"),
            ("nbds://h/?tls-type=anon", "use x509 or psk"),
            ("nbds://h/?tls-priority=NORMAL", "leave it out"),
            ("nbd://h/?nbd-port=x", "from 1 to 65535"),
            ("nbd://h/?nbd-port=0", "from 1 to 65535"),
            ("nbd+ssh://h/?compress=maybe", "must be true or false"),
            ("nbds://h/?tls-type=PSK", "must be x509 or psk"),
            ("nbds://a@h/?tls-username=b", "differ"),
            ("nbds://h/?tls-hostname=a&tls-hostname=b", "is given twice"),
            ("nbd://h/%zz", "%25"),
            ("nbd://h/%2", "%25"),
            ("nbd://h/%ff", "not UTF-8"),
            ("nbd://h/%00", "NUL"),
            ("nbd://h/a#b", "%23"),
            ("nbd://h:0/", "from 1 to 65535"),
            ("nbd://h:65536/", "from 1 to 65535"),
            ("nbd://h:+1/", "from 1 to 65535"),
            ("nbd://::1/", "brackets"),
            ("nbd://[::1/", "lacks a \"]\""),
            ("nbd://[x]/", "not an IPv6 address"),
            ("nbd://[::1]x/", "only a port"),
            ("nbd://a b/", "cannot contain"),
            ("nbd://a%3ab/", "cannot contain"),
            ("nbd+vsock://x/", "number"),
            ("", "scheme"),
        ] {
            let error = error(text);
            assert!(error.contains(part), "{text}: {error}");
            assert!(!error.contains('\n'), "{text}: {error}");
        }
    }

    #[test]
    fn long_names_are_refused() {
        assert!(error(&format!("nbd://h/{}", "a".repeat(4097))).contains("too long"));
        assert!(Uri::parse(&format!("nbd://h/{}", "a".repeat(4096))).is_ok());
        assert!(error(&"x".repeat(limits::URI + 1)).contains("too long"));
    }

    #[test]
    fn recognises_its_schemes() {
        assert!(is_uri("nbd://x") && is_uri("NBDS+UNIX://") && is_uri("nbd+ssh://h"));
        assert!(!is_uri("nbd:x") && !is_uri("file://x") && !is_uri("nbdx://"));
    }
}
