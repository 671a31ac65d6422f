//! The web page at `/`: one file in the binary, which loads nothing from anywhere else.

use hyper::header::{self, HeaderValue};
use hyper::{Response, StatusCode};

use super::http::{self, Body};

const PAGE: &str = include_str!("../../web/index.html");

/// Scripts and styles are the page's own; it talks to this server only.
const POLICY: &str = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

pub fn response() -> Response<Body> {
    let mut response = http::bytes(StatusCode::OK, "text/html; charset=utf-8", PAGE);
    response.headers_mut().insert(header::CONTENT_SECURITY_POLICY, HeaderValue::from_static(POLICY));
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_names_no_other_host() {
        for line in PAGE.lines().filter(|line| line.contains("://")) {
            // Names of XML namespaces are no addresses.
            assert!(line.contains("http://www.w3.org/2000/svg"), "{line}");
        }
        assert!(!PAGE.contains("<link") && !PAGE.contains("src="));
    }
}
