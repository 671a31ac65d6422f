//! How a kernel run is shown: a table for the terminal and a roofline plot for the documentation.

use comfy_table::{CellAlignment, Table, presets};
use plotters::prelude::*;

use super::kernel::{Report, Row};
use super::kernel_inputs::Slots;
use crate::device::cuda::{Kernel, Numerics};

/// One line of the table, also printed while the run goes on.
pub fn line(row: &Row) -> [String; 11] {
    [
        format!("{:?}", row.kernel).to_lowercase(),
        format!("{:?}", row.numerics).to_lowercase(),
        format!("{:?}", row.slots).to_lowercase(),
        row.q.to_string(),
        row.b.to_string(),
        row.l.to_string(),
        format!("{:.1}", row.us),
        format!("{:.1}", row.floor_us),
        format!("{:.0}", row.gbps()),
        format!("{:.1}", row.tflops()),
        format!("{:.0}%", 100.0 * row.of_floor()),
    ]
}

/// The whole run as a table.
pub fn table(report: &Report) -> String {
    let mut table = Table::new();
    table.load_preset(presets::NOTHING);
    table.set_header(["kernel", "numerics", "slots", "q", "B", "L", "us", "floor", "GB/s", "TFLOP/s", "of floor"]);
    table.add_rows(report.rows.iter().map(line));
    for column in table.column_iter_mut().skip(3) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    format!(
        "{}\n{} ({}), read {:.0} GB/s, mma.sync {:.0} TFLOP/s, kernels {}\n",
        table,
        report.device,
        report.driver,
        report.read_gbps,
        report.mma_tflops,
        report.kernel_sha256.get(..12).unwrap_or("none")
    )
}

/// Roofline plot: arithmetic intensity against TFLOP/s, both logarithmic; the roof is what was measured in the same run.
pub fn roofline(report: &Report) -> Result<String, String> {
    let mut svg = String::new();
    {
        let fail = |e: &dyn std::fmt::Display| format!("drawing the roofline: {e}");
        let area = SVGBackend::with_string(&mut svg, (960, 600)).into_drawing_area();
        area.fill(&WHITE).map_err(|e| fail(&e))?;
        let title =
            format!("Tree-verify MLA, {}: {:.0} GB/s read, {:.0} TFLOP/s mma.sync", report.device, report.read_gbps, report.mma_tflops);
        let top = report.mma_tflops * 1.5;
        let mut chart = ChartBuilder::on(&area)
            .caption(title, ("sans-serif", 20))
            .margin(12)
            .x_label_area_size(44)
            .y_label_area_size(64)
            .build_cartesian_2d((8.0..1500.0f64).log_scale(), (1.0..top).log_scale())
            .map_err(|e| fail(&e))?;
        chart.configure_mesh().x_desc("flop / byte").y_desc("TFLOP/s").light_line_style(TRANSPARENT).draw().map_err(|e| fail(&e))?;
        let roof = |x: f64| (x * report.read_gbps / 1e3).min(report.mma_tflops);
        let curve = (0..=200).map(|i| 8.0 * (1500.0f64 / 8.0).powf(f64::from(i) / 200.0)).map(|x| (x, roof(x)));
        chart.draw_series(LineSeries::new(curve, BLACK.stroke_width(2))).map_err(|e| fail(&e))?.label("roof").legend(legend(BLACK));
        let series = [
            (Kernel::Tree, Numerics::Fast, Slots::Blocks, RGBColor(0, 114, 178)),
            (Kernel::Tree, Numerics::Fast, Slots::Random, RGBColor(86, 180, 233)),
            (Kernel::Tree, Numerics::Exact, Slots::Blocks, RGBColor(0, 158, 115)),
            (Kernel::Baseline, Numerics::Exact, Slots::Blocks, RGBColor(160, 160, 160)),
        ];
        for (kernel, numerics, slots, color) in series {
            let points: Vec<_> = report
                .rows
                .iter()
                .filter(|r| (r.kernel, r.numerics, r.slots) == (kernel, numerics, slots))
                .map(|r| (r.flops as f64 / r.bytes as f64, r.tflops().max(1.0)))
                .collect();
            let label = format!("{kernel:?} {numerics:?} {slots:?}").to_lowercase();
            chart
                .draw_series(points.into_iter().map(|at| Circle::new(at, 3, color.filled())))
                .map_err(|e| fail(&e))?
                .label(label)
                .legend(legend(color));
        }
        chart
            .configure_series_labels()
            .position(SeriesLabelPosition::LowerRight)
            .background_style(WHITE.mix(0.8))
            .border_style(BLACK)
            .draw()
            .map_err(|e| fail(&e))?;
        area.present().map_err(|e| fail(&e))?;
    }
    Ok(svg)
}

fn legend(color: RGBColor) -> impl Fn((i32, i32)) -> Circle<(i32, i32), i32> {
    move |at| Circle::new(at, 4, color.filled())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report() -> Report {
        let row = |q: usize, us: f64| Row {
            kernel: Kernel::Tree,
            numerics: Numerics::Fast,
            slots: Slots::Blocks,
            q,
            b: 8,
            l: 4096,
            us,
            bytes: crate::bench::kernel::cell_bytes(q, 8, 4096, 8),
            flops: crate::bench::kernel::cell_flops(q, 8, 4096, 8),
            floor_us: us / 2.0,
        };
        Report {
            device: "a card".into(),
            driver: "CUDA 13.0".into(),
            kernel_sha256: "ab".repeat(32),
            read_gbps: 4500.0,
            mma_tflops: 640.0,
            rows: vec![row(1, 10.0), row(64, 100.0)],
        }
    }

    #[test]
    fn the_table_names_card_ceilings_and_share_of_the_floor() {
        let text = table(&report());
        for word in ["a card", "4500 GB/s", "640 TFLOP/s", "50%", "blocks", "abababababab"] {
            assert!(text.contains(word), "{word} in {text}");
        }
    }

    #[test]
    fn the_plot_is_an_svg_with_a_point_for_every_drawn_row() {
        let svg = roofline(&report()).unwrap();
        assert!(svg.starts_with("<svg"));
        assert!(svg.matches("<circle").count() >= 2);
    }
}
