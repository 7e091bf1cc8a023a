//! The files of the page, which are part of the program.

use crate::http::HttpReply;

const JS: &str = "text/javascript; charset=utf-8";
const CSS: &str = "text/css; charset=utf-8";

/// Path, media type and content of each file.
const FILES: [(&str, &str, &str); 7] = [
    ("/", "text/html; charset=utf-8", include_str!("../page/index.html")),
    ("/page.css", CSS, include_str!("../page/page.css")),
    ("/page.js", JS, include_str!("../page/page.js")),
    ("/icon.svg", "image/svg+xml", include_str!("../page/icon.svg")),
    ("/uplot.js", JS, include_str!("../page/uplot/uPlot.iife.min.js")),
    ("/uplot.css", CSS, include_str!("../page/uplot/uPlot.min.css")),
    ("/uplot-license.txt", "text/plain; charset=utf-8", include_str!("../page/uplot/LICENSE")),
];

/// The file at this path.
pub fn file(path: &str) -> Option<HttpReply> {
    let (_, kind, text) = FILES.iter().find(|(known, ..)| *known == path)?;
    Some(HttpReply::ok(kind, *text))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn everything_comes_from_this_server() {
        let own = FILES.iter().filter(|(path, ..)| !path.contains("uplot"));
        for (path, _, text) in own {
            for elsewhere in [
                "http:",
                "https:",
                "src=\"//",
                "@import",
                "url(",
                "style=\"",
                "<style",
                " onclick=",
            ] {
                // A name space is not fetched.
                let text = text.replace("http://www.w3.org/2000/svg", "");
                assert!(!text.contains(elsewhere), "{path}: {elsewhere}");
            }
        }
        let (.., html) = FILES[0];
        for word in html.split('"').filter(|word| word.starts_with('/')) {
            let known = FILES.iter().any(|(path, ..)| *path == word);
            assert!(known || ["/metrics", "/status.json"].contains(&word), "{word}");
        }
        assert_eq!(html.matches("<script").count(), html.matches("<script src=").count());
    }
}
