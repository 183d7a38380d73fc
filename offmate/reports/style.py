"""Style of the HTML picture, kept small because every notebook cell that shows a picture repeats it."""

STYLE = """
.om{--paper:#fff;--ink:#1b1f24;--soft:#59636e;--line:#e3e6ea;--band:#f3f5f7;--tip:#1b1f24;--tipink:#fff;
--stall:#d55e00;color-scheme:light dark;margin:0;padding:12px;background:var(--paper);color:var(--ink);
font:13px/1.45 system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif;position:relative;
box-sizing:border-box}
@media (prefers-color-scheme:dark){.om{--paper:#15181c;--ink:#e6e9ed;--soft:#9aa4af;--line:#2b3138;--band:#1e2329;
--tip:#e6e9ed;--tipink:#15181c;--stall:#ff8a3d}}
.om *{box-sizing:border-box}
.om h2{font-size:16px;margin:0}.om h3{font-size:14px;margin:18px 0 0}.om p{margin:2px 0}
.om figcaption p{color:var(--soft);max-width:110ch}
.om-top{display:flex;justify-content:space-between;gap:12px;flex-wrap:wrap}
.om-zoom{color:var(--soft);font-size:12px;display:none}.om-live .om-zoom{display:inline}
.om-zoom button{font:inherit;color:inherit;background:var(--band);border:1px solid var(--line);border-radius:4px;
margin-left:3px;padding:0 6px;cursor:pointer}.om-zoom button.on{color:var(--ink);border-color:var(--soft)}
.om .om-head{margin:10px 0 2px;font-size:14px}
.om .om-legend{display:flex;flex-wrap:wrap;gap:2px 16px;color:var(--soft);font-size:12px;margin:4px 0 8px}
.om-legend small{color:var(--ink);font-size:12px}.om-note{margin-left:auto}
.om-key{display:inline-block;width:12px;height:12px;border-radius:2px;vertical-align:-2px}
.om-ramp{display:inline-block;width:120px;height:10px;border-radius:2px;margin:0 2px}
.om-grid{display:flex}.om-side{flex:0 0 92px}
.om-scroll{flex:1;overflow-x:auto;min-width:0;user-select:none;-webkit-user-select:none}.om-wide{position:relative;width:100%;min-width:240px}
.om-phases,.om-axis{position:relative;height:20px}
.om-phases b{position:sticky;left:5px;font-weight:400}
.om-phases span{position:absolute;overflow:clip;white-space:nowrap;color:var(--soft);font-size:12px;
border-left:2px solid var(--soft);padding-left:5px;height:18px}
.om-row{position:relative;height:34px;margin-bottom:4px}
.om-scroll .om-row{background:var(--band);overflow:hidden}
.om-label{display:flex;flex-direction:column;justify-content:center;line-height:1.2;white-space:nowrap}
.om-label small{color:var(--soft);font-size:11px}
.om-row svg{position:absolute;inset:0;width:100%;height:100%;display:block}
.om-row rect:hover{filter:brightness(1.3)}
.om-b{position:absolute;top:0;bottom:0;container-type:inline-size;overflow:hidden;pointer-events:none}
.om-b s{display:none;font:11px/34px system-ui,"DejaVu Sans",sans-serif;text-decoration:none;text-align:center}
@container (min-width:27px){.om-b s{display:block}}
.om-key.om-upd{background:#2b8a9b;height:6px;vertical-align:1px}
.om-stall{position:absolute;top:0;bottom:0;background:repeating-linear-gradient(-45deg,var(--stall) 0 3px,
var(--paper) 3px 5px);box-shadow:inset 0 -4px var(--stall)}
.om-stall.om-key{position:static}
.om-line{position:absolute;top:0;bottom:0;border-left:1px solid var(--line);pointer-events:none}
.om-axis span{position:absolute;font-size:11px;color:var(--soft);transform:translateX(-50%);white-space:nowrap}
.om-axis span:first-child{transform:none}
.om-live .om-scroll{cursor:crosshair}.om-mark{position:absolute;top:0;bottom:0;background:var(--ink);opacity:.18;
pointer-events:none;z-index:3}
.om .om-about{font-size:13px;margin:2px 0}.om details{color:var(--soft);margin:2px 0}.om summary{cursor:pointer}
.om-table{overflow-x:auto}.om-table table{border-spacing:0;font-size:13px;margin-top:12px}
.om-table td,.om-table th{padding:3px 14px 3px 0;text-align:right;white-space:nowrap;
border-bottom:1px solid var(--line);font-weight:400}
.om-table th{color:var(--soft)}.om-table td:first-child,.om-table th:first-child{text-align:left;white-space:normal}
.om-mem{position:relative;height:200px;margin-top:4px}
.om-side .om-mem span{position:absolute;right:8px;transform:translateY(50%);font-size:11px;color:var(--soft)}
.om-mem svg{position:absolute;inset:0;width:100%;height:100%;display:block}
.om-scroll .om-mem{border-bottom:1px solid var(--soft)}
.om-budget{position:absolute;left:0;right:0;border-top:1.5px dashed var(--ink);pointer-events:none}
.om-budget span{position:sticky;float:left;left:4px;font-size:11px;line-height:1;padding:1px 3px;margin-top:-12px;
background:var(--paper)}
.om-hair{position:absolute;top:0;bottom:0;border-left:1px solid var(--ink);pointer-events:none}
.om-tip{position:fixed;z-index:9;background:var(--tip);color:var(--tipink);padding:6px 9px;border-radius:5px;
font-size:12px;white-space:pre;pointer-events:none;max-width:90vw;overflow:hidden}
.om-tip table{border-spacing:0}.om-tip td{padding:0 10px 0 0}.om-tip td+td{text-align:right;padding:0}
""".strip()
